"""Detects whether tensors of lazy logits were written to before the logits were computed."""

import torch
from torch import Tensor


class Watch:
    """Detects writes to a weight, even if they do not change the weight's version counter.

    Some optimisers write to the weight through `.data` or through a raw pointer. Such writes do not
    change the version counter. So about 32 x 32 numbers of the weight are copied when the logits
    are created. On a CPU, the copied numbers are compared with the weight before each use of the
    logits. On other devices, the copied numbers are compared only after a backward, because the
    host must wait for the comparison. If the logits were created for inference, the copied numbers
    are compared before each use, on all devices.
    """

    def __init__(self, weight: Tensor, passed: bool = False):
        self.weight = weight
        # `passed` becomes non-empty when a backward reaches the head. If the logits are for
        # inference, `passed` is never empty.
        self.passed: list[bool] = [True] * passed
        known = type(weight) is Tensor and weight.device.type != "meta" and weight.dim() == 2
        known = known and not torch.compiler.is_compiling()
        in_memory = known and weight.untyped_storage().size() > 0  # FSDP may have freed the weight
        self.sample = self.read() if in_memory else None

    def read(self) -> Tensor:
        """Copies the bytes of about 32 x 32 numbers of the weight."""
        rows, columns = (max(size // 32, 1) for size in self.weight.shape)
        some = self.weight[::rows, ::columns].clone(memory_format=torch.contiguous_format)
        return some.view(-1).view(torch.uint8)

    def differs(self) -> bool:
        weight, sample = self.weight, self.sample
        freed = not weight.untyped_storage().size() if sample is not None else True  # by FSDP
        if freed or not (weight.is_cpu or self.passed):
            return False
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        with torch.no_grad():
            return not torch.equal(self.read(), sample)  # pyright: ignore


class Watches:
    """Detects writes to the weights of all heads in a sum of lazy logits (sums.py)."""

    def __init__(self, watches: "tuple[Watch | Watches, ...]"):
        self.watches = watches

    def differs(self) -> bool:
        return any(watch.differs() for watch in self.watches)


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)
