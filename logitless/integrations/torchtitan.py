"""torchtitan, in a config function:

    from logitless.integrations.torchtitan import HeadLoss
    loss=HeadLoss.Config(loss_fn=CrossEntropyLoss.Config(...))

HeadLoss takes the place of ChunkedLossWrapper, and is a subclass, because only then the Trainer
skips the head in the model's forward. The head runs once, through its own forward with the hooks of
FSDP2, and its lazy logits go to the inner loss: torchtitan's, those of its RL, or your own.
"""

from dataclasses import dataclass
from typing import Any

from .seams import check_effect, check_seams

LOSS = "torchtitan.components.loss:ChunkedLossWrapper"
check_seams("torchtitan", {
    f"{LOSS}.__init__": "self, config, compile_config",
    f"{LOSS}.set_lm_head": "self, lm_head",
    f"{LOSS}.__call__": "self, pred, labels, global_valid_tokens, loss_inputs",
})  # fmt: skip

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed.spmd_types import spmd_mesh_size

from ..core.source import is_dtensor
from ..lazy.fuse import fuse, is_fused


class HeadLoss(ChunkedLossWrapper):
    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        workspace: int | None = None
        """Bytes of logits in memory at once; None: our default."""
        drop_ignored: bool = False
        """True: rows without a label take no time, but the host waits, which the CUDA graph of
        torchtitan's step forbids. So it needs training.disable_cuda_graphs."""
        strict: bool = True
        """False: plain logits warn instead of stopping the run."""

    def __init__(self, config: Config, *, compile_config: Any = None):
        super().__init__(config)  # not compiled: lazy logits are no input of a graph
        self.strict = config.strict
        self.options = {"workspace": config.workspace, "drop_ignored": config.drop_ignored}

    def set_lm_head(self, lm_head: Any) -> None:
        super().set_lm_head(lm_head)
        fuse(lm_head, head=lm_head, **self.options)

    def __call__(self, pred: Any, labels: Any, global_valid_tokens: Any = None, **loss_inputs: Any):
        if spmd_mesh_size("tp") > 1 or is_dtensor(pred):
            raise NotImplementedError(
                "HeadLoss does not support tensor parallelism: torchtitan's losses read the values"
                " of a vocabulary shard. Use ChunkedLossWrapper."
            )
        logits = self.lm_head(pred)
        if pred.requires_grad:
            check_effect(is_fused(self.lm_head), self.strict)
        return self.loss_fn(logits, labels, global_valid_tokens, **loss_inputs)
