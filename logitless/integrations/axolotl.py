"""axolotl, in its YAML file:

    plugins:
      - logitless.integrations.axolotl.LogitlessPlugin

Optional keys: `logitless_workspace: 1073741824`, the bytes of logits in memory at once, and
`logitless_strict: false`, which warns instead of stopping if the first step had plain logits.
"""

from typing import Any

from .seams import check_seams

BASE = "axolotl.integrations.base:BasePlugin"
check_seams("axolotl", {
    f"{BASE}.get_input_args": "self",
    f"{BASE}.register": "self, cfg",
    f"{BASE}.post_model_load": "self, cfg, model",
    f"{BASE}.post_trainer_create": "self, cfg, trainer",
})  # fmt: skip

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..lazy.fuse import fuse
from .transformers import LogitlessCallback

# Keys of axolotl that replace the same loss.
RIVALS = (
    "cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)  # fmt: skip


class LogitlessArgs(BaseModel):
    """Our keys of the YAML file."""

    logitless_workspace: int | None = None
    logitless_strict: bool = True


class LogitlessPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.LogitlessArgs"

    def register(self, cfg: Any) -> None:
        rivals = [key for key in RIVALS if cfg.get(key)]
        if rivals:
            raise ValueError(
                f"logitless and {rivals[0]} replace the same loss: remove one of them."
            )

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Runs after LoRA, for policy and reference, and before the trainer shards the model."""
        if not (cfg.reward_model or cfg.process_reward_model):  # heads with one or two outputs
            fuse(model, workspace=cfg.logitless_workspace)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if not (cfg.reward_model or cfg.process_reward_model):
            trainer.add_callback(LogitlessCallback(strict=cfg.logitless_strict, trainer=trainer))
