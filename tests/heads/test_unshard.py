"""Heads whose weight is freed after forward, and gathered when it is read."""

import pytest
import torch
from torch import nn

import logitless as ll
from tests.support.lazy_models import D, V


class Freed(nn.Linear):
    """As a module that FSDP2 shards: its weight is freed after forward, and gathered when asked."""

    def forward(self, x):
        self.numbers, self.gathered = self.weight.detach().clone(), 0
        made = ll.LinearLogits(x, self.weight, workspace=1)
        made._source.head = made.head.replace(module=self)
        self.reshard()
        return made[:]

    def unshard(self):
        self.gathered += 1
        self.weight.untyped_storage().resize_(self.numbers.nbytes)
        with torch.no_grad():
            self.weight.data.copy_(self.numbers)

    def reshard(self):
        self.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("masked", [0, 3, 6])
def test_heads_are_gathered_once_whatever_the_rows(masked, reduction, device):
    """Or ranks whose masks differ would wait for each other."""
    student, teacher = (Freed(D, V, bias=False, device=device) for _ in range(2))
    hidden = torch.randn(6, D, device=device, requires_grad=True)
    mask = torch.arange(6, device=device) >= masked
    value = ll.kl_div(
        student(hidden), teacher(hidden).detach(), direction="forward", mask=mask,
        reduction=reduction,
    )  # fmt: skip
    assert (student.gathered, teacher.gathered) == (1, 1)
    value.sum().backward()
    again = 1 + (reduction == "none")
    assert (student.gathered, teacher.gathered) == (again, again)
