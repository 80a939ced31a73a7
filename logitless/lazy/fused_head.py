"""The forward of a fused head.

A head is often not a plain linear layer. For example, adapters wrap heads, quantisers replace
heads, the accelerate library sets hooks on heads, and users set their own forward. So a fused head
still runs its own forward. Inside the head's own forward, `torch.nn.functional.linear` returns lazy
logits if the weight has one row per token of the vocabulary. Operations before and after `linear`
get the same numbers as in the unfused model. A head that does not call `linear` returns the same
result as in the unfused model. For some layers of other libraries, layers.py contains a second
forward. The second forward calls `linear` and has the same result. Inside a fused head, such a
layer runs its second forward.
"""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.call import in_func
from ..core.option_checks import LOGITS_DTYPES
from ..core.source import is_dtensor
from ..heads.gemms import autocasts
from ..heads.linear import checked_head
from ..heads.quantized import is_quantized, why_not_readable
from .checks import name_of
from .colwise import spread_logits, spread_plain_logits
from .compiled import can_leave_graph, can_write, outside_of_graph
from .layers import has_second_forward, second_forward
from .logits import lazy_logits_of
from .recipe import is_small
from .report import warn_once

_lazy = ContextVar("lazy", default=False)
# The list holds one item per `with lazy_logits():` block that is running, in any thread. Dynamo
# cannot read a ContextVar. Dynamo can read this list, and recompiles code when the list changes
# from empty to non-empty or back.
_contexts: list[None] = []

COMPILED = "torch.compile computed the logits as a plain product inside of its graph."


@contextlib.contextmanager
def lazy_logits():
    """Makes fused heads return lazy logits even without gradients, for example for a teacher.

    Outside of this context manager, logits without gradients are lazy only if they are large and
    the option `lazy_inference` of `fuse` is true. Inside this context manager, logits of any size
    are lazy. Logits that are created inside this context manager must not be written to. Using
    these logits raises an error if the weight was written to after the logits were created. On a
    GPU, a write is detected only if the write changes the weight's version counter. Comparing the
    weight with a copy would make the host wait for the GPU (class Watch).

    >>> with torch.no_grad(), lazy_logits():
    ...     teacher_logits = teacher(ids).logits
    >>> loss = kl_div(student(ids).logits, teacher_logits, direction="forward")
    """
    before = _lazy.set(True)
    _contexts.append(None)
    try:
        yield
    finally:
        _contexts.pop()
        _lazy.reset(before)


class FusedForward:
    """The forward of a fused head, which runs the head's earlier forward in a `Products` block.

    `below` is the forward that other code had set on the head earlier. If `below` is None, the
    forward of the head's class is called. Other code can replace the FusedForward later. Then the
    `Guard` (model_hooks.py) sets a new FusedForward, whose `below` is the forward of the other
    code.
    """

    def __init__(self, head: nn.Module, below: Callable | None, guard: Any):
        self.head, self.below, self.guard = head, below, guard

    def forward(self, *args, **kwargs):
        guard = self.guard
        if not guard.active or guard.unfusable is not None:
            return self.run(*args, **kwargs)
        if torch.compiler.is_compiling():
            wanted = wants_gradient(*args, *self.head.parameters())
            if leaves_graph(wanted, plain=not wanted and self.stays_plain(args)):
                return outside_of_graph(self.logits, *args, **kwargs)
            if wanted and can_write():
                guard.obstacle = COMPILED
        return self.logits(*args, **kwargs)

    def logits(self, *args, **kwargs):
        """Returns the logits of a head that can be fused."""
        guard, traced = self.guard, is_traced()
        asked = not traced and (torch.is_grad_enabled() or _lazy.get())
        plain = traced or (not asked and self.stays_plain(args))
        if plain and guard.options.get("logits_dtype") is None:
            return self.run(*args, **kwargs)
        products = Products(self.head, guard.options, guard.lazy_inference)
        own = traced or self.below is not None
        second = None if own else second_forward(self.head, args, kwargs)
        with products:
            logits = self.run(*args, **kwargs) if second is None else second(*args)
        if asked:
            guard.called(logits, products)
        return logits

    def stays_plain(self, args: tuple) -> bool:
        """Whether logits without gradients will be plain tensors. Runs before the forward."""
        if not self.guard.lazy_inference:
            return True
        width = self.head.__dict__.get("out_features") or width_of(self.head)
        return has_small_logits(args[0] if args else None, width)

    def run(self, *args, **kwargs):
        if self.below is None:
            return type(self.head).forward(self.head, *args, **kwargs)
        return self.below(*args, **kwargs)


def forward_set_on(head: nn.Module) -> FusedForward | None:
    """Returns the FusedForward that is set as the head's forward, or None."""
    forward = head.__dict__.get("forward")
    ours = getattr(forward, "__func__", None) is FusedForward.forward
    return forward.__self__ if ours else None  # pyright: ignore


def is_set(head: nn.Module | None, guard: Any) -> bool:
    """Whether the forward of a head is a FusedForward of this guard."""
    ours = None if head is None else forward_set_on(head)
    return ours is not None and ours.head is head and ours.guard is guard


def set_forward(head: nn.Module, guard: Any) -> None:
    """Sets a FusedForward on a head, and on each layer inside the head that has a second forward.

    Each FusedForward calls the earlier forward of its module.
    """
    for module in head.modules():
        if module is head or has_second_forward(module):
            _set_forward(module, guard)


def _set_forward(head: nn.Module, guard: Any) -> None:
    if is_set(head, guard):
        return
    ours = forward_set_on(head)
    # A replica that DataParallel creates has the FusedForward of the original head. The new
    # FusedForward of the replica calls the same `below`.
    below = head.__dict__.get("forward") if ours is None else ours.below
    head.__dict__["forward"] = FusedForward(head, below, guard).forward


def remove_forward(head: nn.Module) -> None:
    ours = forward_set_on(head)
    if ours is None:
        return
    if ours.below is None:
        del head.__dict__["forward"]
    else:
        head.__dict__["forward"] = ours.below


class Products(TorchFunctionMode):
    """Inside a `Products` block, F.linear with a weight (V, D) calls `lazy_product`."""

    def __init__(self, head: nn.Module, options: dict, lazy_inference: bool):
        super().__init__()
        self.head, self.options, self.lazy_inference = head, options, lazy_inference
        self.width = width_of(head)
        self.grad = torch.is_grad_enabled()
        self.found = False  # whether the head computed a product as wide as the vocabulary
        self.obstacle: str | None = None  # the reason why the head's product was not lazy

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.linear:
            return func(*args, **kwargs)
        hidden, weight, bias = _tensors(*args, **kwargs)
        if weight.shape[0] != self.width and weight is not self.head._parameters.get("weight"):
            return func(*args, **kwargs)
        if self.grad and not torch.is_grad_enabled():
            # The head called an autograd function, whose forward must return a plain tensor.
            return func(*args, **kwargs)
        self.found, self.obstacle = True, obstacle_of(hidden, weight, bias)
        if self.obstacle is not None:
            return func(*args, **kwargs)
        # `wanted` depends on all parameters of the head, because an adapter can require gradients
        # while `weight` is frozen.
        wanted = wants_gradient(*self.head.parameters())
        owner = owner_of(weight, self.head)
        tensors = (hidden, weight, bias)
        return lazy_product(tensors, self.options, owner, self.lazy_inference, wanted)

    def why_plain(self) -> str:
        """The reason why the logits are not lazy, as a phrase that follows the head's name."""
        if self.obstacle is not None:
            return f"computes plain logits, because {self.obstacle}"
        if self.found:
            return "applies an operation to its logits that materialises them"
        return "does not compute its logits by torch.nn.functional.linear"


def _tensors(input: Tensor, weight: Tensor, bias: Tensor | None = None):
    """The arguments of torch.nn.functional.linear."""
    return input, weight, bias


def width_of(head: nn.Module) -> int:
    """The width of a head's logits, which is the largest width of its linear layers.

    Only the __dict__ of each module is read, because reading attributes of adapters may run code.
    """
    return max([0, *(m.__dict__.get("out_features", 0) for m in head.modules())])


def owner_of(weight: Tensor, head: nn.Module) -> nn.Module:
    """The FSDP module that gathers and frees this weight, or the head if no such module exists."""
    sharded = [m for m in head.modules() if hasattr(type(m), "unshard")]
    owners = [m for m in sharded if any(p is weight for p in m.parameters())]
    return owners[-1] if owners else head


def obstacle_of(hidden: Any, weight: Any, bias: Any) -> str | None:
    """The reason why hidden @ weight.T + bias cannot be lazy, or None."""
    given = {"input": hidden, "weight": weight, "bias": bias}
    tensors = {name: t for name, t in given.items() if t is not None}
    for name, t in tensors.items():
        quantised = isinstance(t, Tensor) and is_quantized(t)
        if not isinstance(t, Tensor) or is_lazy(t) or (name == "bias" and quantised):
            return f"its {name} is a {name_of(t)}"
        if name == "weight" and quantised and (reason := why_not_readable(t)) is not None:
            return f"its weight, a {name_of(t)}, {reason}"
        if t.dtype not in LOGITS_DTYPES:
            return f"its {name} has {t.dtype}"
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions"
    if is_dtensor(hidden) != is_dtensor(weight):
        return "only one of its input and weight is a DTensor"
    dtypes = sorted({str(t.dtype) for t in tensors.values()})
    if len(dtypes) > 1 and not autocasts(hidden.device):
        return f"its tensors have {' and '.join(dtypes)}"
    return None


def is_readable(weight: Tensor) -> bool:
    """Whether the weight is a quantised weight that can be dequantised in blocks."""
    return is_quantized(weight) and why_not_readable(weight) is None


def wants_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )


def is_traced() -> bool:
    """Whether a compiler, a tracer or torch.func runs the code. Traced logits are never lazy."""
    return torch.compiler.is_compiling() or in_func() or torch._C._is_tracing()


def serves_inference(hidden: Any, weight: Any, module: nn.Module, options: dict) -> bool:
    """Whether the head returns lazy logits in a forward without gradients.

    Small logits are plain tensors. While a CUDA graph is captured, logits are plain tensors, so
    that each replay of the graph computes the logits again. If a head is an FSDP module of its own,
    its logits are plain tensors. Reading lazy logits of such a head would gather the weight from
    all ranks. So each rank would wait until all other ranks read their logits too.
    """
    plain = type(hidden) in (Tensor, nn.Parameter)
    plain = plain and (type(weight) in (Tensor, nn.Parameter) or is_readable(weight))
    if not plain or hidden.is_meta or hasattr(type(module), "unshard"):
        return False
    dtype = options.get("logits_dtype") or hidden.dtype
    if is_small(hidden.shape[:-1].numel() * weight.shape[0], dtype):
        return False
    return not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())


def has_small_logits(hidden: Any, width: int) -> bool:
    """Whether the logits of `hidden` are so small that they are plain tensors in inference.

    The result is False if `hidden` is not a plain tensor. This check must be fast, because decoding
    calls the head once per token.
    """
    if type(hidden) is not Tensor or not hidden.numel():
        return False
    return is_small(hidden.numel() // hidden.shape[-1] * width, hidden.dtype)


def leaves_graph(wanted: bool, plain: bool) -> bool:
    """Whether a traced head leaves Dynamo's graph, so that its logits can be lazy.

    `wanted` is true if gradients are needed. `plain` is true if the logits would be plain tensors
    outside of a `lazy_logits` block.
    """
    if plain and not _contexts:
        return False
    if can_leave_graph() and not in_func():
        return True
    if wanted:
        _say_how_to_compile()
    return False


def head_logits(
    module: nn.Linear, hidden: Tensor, options: dict, lazy_inference: bool = True
) -> Tensor:
    """Returns the logits of a linear layer, lazy or as a plain tensor (see `lazy_product`)."""
    tensors = (hidden, module.weight, module.bias)
    if torch.compiler.is_compiling():
        wanted = wants_gradient(*tensors)
        small = not wanted and has_small_logits(hidden, module.out_features)
        if leaves_graph(wanted, plain=not wanted and (small or not lazy_inference)):
            return outside_of_graph(lazy_product, tensors, options, module, lazy_inference)
    return lazy_product(tensors, options, module, lazy_inference)


def lazy_product(
    tensors: tuple,
    options: dict,
    module: nn.Module,
    lazy_inference: bool = True,
    wanted: bool = False,
) -> Tensor:
    """Returns hidden @ weight.T + bias.

    The result is lazy if gradients are needed, or if the call is inside `lazy_logits()`. `wanted`
    is true if a parameter of the head needs a gradient. Then the result is lazy even if `hidden`,
    `weight` and `bias` require no gradient. If `lazy_inference` is true, large results without
    gradients are lazy too (`serves_inference`). Under a compiler, a tracer or torch.func, the
    result is a plain tensor.
    """
    hidden, weight, _ = tensors
    spread = is_dtensor(hidden) and is_dtensor(weight)
    traced = is_traced()
    asked = not traced and (wanted or wants_gradient(*tensors) or _lazy.get())
    may = lazy_inference and not traced
    if not asked and not (may and serves_inference(hidden, weight, module, options)):
        if options.get("logits_dtype") is None:
            return nn.functional.linear(*tensors)
        if spread:
            return spread_plain_logits(tensors, options)
        return checked_head(*tensors, **options).logits()
    if spread:
        return spread_logits(tensors, options, module)
    # `checked_head` also casts the tensors under autocast.
    head = checked_head(*tensors, **options).replace(module=module)
    return lazy_logits_of(head, inference=not asked)


def is_lazy(logits: Any) -> bool:
    return not getattr(logits, "exists", True)


def _say_how_to_compile() -> None:
    """Warns while torch.compile traces a graph, without adding the warning to the graph."""
    if torch.compiler.is_exporting():
        warn_once(
            "torch.export records the head of a fused model as a plain product, and the exported"
            " program materialises its logits. If the program does not train, export it under"
            " torch.no_grad(), which gives no warning."
        )
        return
    warn_once(
        "torch.compile computes the logits of a fused head as a plain product inside of its graph,"
        " which materialises the logits. The graph must be able to end before the head. Call"
        " torch.compile without fullgraph=True, and call the head outside of"
        " torch.utils.checkpoint."
    )


# Dynamo calls `_say_how_to_compile` while it traces. This line has the same effect as
# torch.compiler.assume_constant_result, but does not import the compiler.
_say_how_to_compile._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
