"""calculate_loss of NeMo Automodel with our class equals its MaskedCrossEntropy over logits."""

import pytest
import torch
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from torch import nn

from tests.support.trainer_runs import WORKSPACE, D, V, once

pytestmark = pytest.mark.filterwarnings("default")
TARGET = "logitless.integrations.automodel.LinearCrossEntropy"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.lm_head = nn.Linear(D, D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.3)

    def get_output_embeddings(self):
        return self.lm_head


@pytest.fixture(autouse=True)
def user_modules(monkeypatch):
    monkeypatch.setenv("NEMO_ENABLE_USER_MODULES", "1")


def instantiate(**options):
    return ConfigNode({"_target_": TARGET, **options}).instantiate()


def test_equal(compare):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 40, D, generator=draw)
    labels = torch.randint(0, V, (2, 40), generator=draw)
    labels[0, :9] = -100
    how = {"labels": labels, "num_label_tokens": int((labels != -100).sum())}
    theirs, ours = Model(), Model()

    def plain():
        hidden = theirs.body(inputs)
        logits = theirs.lm_head(hidden)
        loss = MaskedCrossEntropy()
        return calculate_loss(loss, logits=logits, model=theirs, hidden_states=hidden, **how)

    def lazy():
        loss = instantiate(workspace=WORKSPACE)
        return calculate_loss(loss, logits=None, model=ours, hidden_states=ours.body(inputs), **how)

    want, got = once(theirs, plain), once(ours, lazy)
    compare("NeMo Automodel", "calculate_loss", f"`loss_fn: {{_target_: {TARGET}}}`", got, want)


def test_weights_of_rows():
    model, labels = Model(), torch.arange(6).view(2, 3)
    hidden, weights = torch.randn(2, 3, D), torch.rand(2, 3)
    nll = nn.functional.cross_entropy(
        model.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="none"
    )
    got = instantiate()(hidden, labels, model.lm_head.weight, 4, loss_weights=weights)
    torch.testing.assert_close(got, (nll * weights.flatten()).sum() / 4)
    with pytest.raises(ValueError, match="reduction must be 'sum'"):
        instantiate(reduction="mean")(hidden, labels, model.lm_head.weight, 4)
