"""Losses against a dense teacher, by this library and by the definitions in oracle.py."""

import pytest
import torch

from logitless import jsd, kl_div, soft_cross_entropy, tvd
from tests.support import oracle

V = 75  # two blocks of 32 and a shorter block; rows are not 16-byte aligned
ROWS = 3


def naive(x, teacher, loss, **how):
    name, beta = loss
    if name == "soft":
        return oracle.soft_cross_entropy(x, teacher, **how)
    kind = f"{name}_kl" if name in ("forward", "reverse") else name
    return oracle.dense_divergence(x, teacher, kind, beta=beta, **how)


def ours(x, teacher, loss, **how):
    name, beta = loss
    if name == "soft":
        return soft_cross_entropy(x, teacher, **how)
    if name == "jsd":
        return jsd(x, teacher, beta=beta, **how)
    if name == "tvd":
        return tvd(x, teacher, **how)
    if name.startswith("skewed"):
        return kl_div(x, teacher, direction=name.removeprefix("skewed_"), skew=beta, **how)
    return kl_div(x, teacher, direction=name, **how)


LOSSES = {
    "forward": ("forward", None),
    "reverse": ("reverse", None),
    "skewed forward": ("skewed_forward", 0.1),
    "skewed reverse": ("skewed_reverse", 0.1),
    "jsd 0.1": ("jsd", 0.1),
    "jsd 0.5": ("jsd", 0.5),
    "tvd": ("tvd", None),
    "soft": ("soft", None),
}
DIVERGENCES = {name: loss for name, loss in LOSSES.items() if name != "soft"}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
every_divergence = pytest.mark.parametrize("loss", DIVERGENCES.values(), ids=DIVERGENCES.keys())


def make(loss, rows=(ROWS,), vocab=V, dtype=torch.float32, device="cpu", scale=3.0, teacher=None):
    x = (torch.randn(*rows, vocab, dtype=torch.float64) * scale).to(dtype).to(device)
    t = torch.randn(*rows, vocab, dtype=torch.float64) * scale
    t = t.softmax(-1) if loss[0] == "soft" else t
    return x, t.to(teacher or dtype).to(device)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "row temperature": {"temperature": torch.tensor([0.5, 1.0, 2.5])},
    "softcap": {"softcap": 5.0, "temperature": 1.3},
    "all": {
        "temperature": torch.tensor([0.5, 1.0, 2.5]),
        "softcap": 6.0,
        "mask": torch.tensor([True, False, True]),
        "row_weight": torch.tensor([-1.0, 0.5, 2.0]),
    },
}
