"""`ll.hf`: the public names for Transformers and TRL. Needs the package transformers."""

from .integrations.on_policy import sample as sample
from .integrations.seams import NoEffectError as NoEffectError
from .integrations.transformers import DistillTrainer as DistillTrainer
from .integrations.transformers import LogitlessCallback as LogitlessCallback
from .integrations.trl import OnlyFuseNeededError as OnlyFuseNeededError
from .integrations.trl import unuse_in_trl as unuse_in_trl
from .integrations.trl import use_in_trl as use_in_trl
