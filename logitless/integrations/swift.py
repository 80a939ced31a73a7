"""ms-swift: write one line into a file plugin.py,

    import logitless.integrations.swift

and pass `--external_plugins plugin.py --callbacks logitless` to `swift sft` or `swift rlhf`. A loss
of `--loss_type` would be too late: it gets logits that exist already.
"""

from typing import Any, ClassVar

from .seams import UnknownTrainerError, check_seams

check_seams("ms-swift", {"swift.callbacks:TrainerCallback.__init__": "self, args, trainer"})

from swift.callbacks import callbacks_map

from .transformers import LogitlessCallback

NAME = "logitless"


class SwiftCallback(LogitlessCallback):
    defaults: ClassVar[dict[str, Any]] = {}  # plugin.py can set options of LogitlessCallback

    def __init__(self, args: Any, trainer: Any):
        if getattr(args, "use_liger_kernel", False):
            raise ValueError(
                "logitless and use_liger_kernel replace the same loss: remove one of them."
            )
        super().__init__(trainer=trainer, **self.defaults)


if callbacks_map.setdefault(NAME, SwiftCallback) is not SwiftCallback:
    raise UnknownTrainerError(f"ms-swift has another callback named {NAME!r}.")
