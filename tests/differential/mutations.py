"""`make mutants`: bugs put into the library on purpose, and the tests that find them.

    python -m tests.differential.mutations [NAME ...]

A mutant replaces one function of the library, for a whole run of pytest (`pytest --mutant NAME`).
It changes what the eager backend or both backends compute. For each mutant, the command runs the
files of `make test` that are named here, in a new process, and prints the first test that fails.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from logitless import contract, eager
from logitless.core import call, target_checks, tensor_checks
from logitless.core.groups import Groups
from logitless.eager import contrastive, rows, stats_bwd
from logitless.heads import choose_cut, gemms, run
from logitless.lazy import rows as lazy_rows
from logitless.lazy.recipe import Watch
from logitless.losses import sampled_softmax
from logitless.parallel.rank_merge import ColumnBackend
from logitless.store import codes as store_codes
from logitless.store import shard as store_shard
from tests.support.paths import ROOT
from tests.support.replaced import replaced

Plant = Callable[[], AbstractContextManager]


class Mutant(NamedTuple):
    plant: Plant
    tests: tuple[str, ...]  # the files that find it


MUTANTS: dict[str, Mutant] = {}


def found_by(*tests: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        MUTANTS[plant.__name__] = Mutant(plant, tests)
        return plant

    return register


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The library with this bug, which remembers nothing that it took for right before or here."""
    with mock.patch.object(call, "_passed", {}), MUTANTS[name].plant():
        yield


# --- statistics and their gradient


@found_by("heads/test_blocks.py")
def merge_without_scale():
    """The sums of exponentials of two parts are added, although each is relative to its own max."""
    right = eager.merge

    def merge(several, reading):
        merged = right(several, reading)
        merged.state[..., 0, contract.S] = sum(p.state[..., contract.S].sum(-1) for p in several)
        return merged

    return replaced(right, merge)


def without(field: int) -> AbstractContextManager:
    """The backward formula leaves out the term of one coefficient."""
    right = eager.gradient

    def gradient(x, reading, state, coefficients, *how, **options):
        table = coefficients.rows.clone()
        table[:, field] = 0
        return right(x, reading, state, coefficients._replace(rows=table), *how, **options)

    return replaced(right, gradient)


@found_by("losses/test_cross_entropy.py")
def gradient_without_a():
    return without(contract.A)


@found_by("differential/test_differential.py")
def gradient_without_b():
    return without(contract.B)


@found_by("losses/test_cross_entropy.py")
def gradient_without_g():
    return without(contract.G_LABEL)


@found_by("losses/test_cross_entropy.py")
def softcap_slope():
    """The derivative of tanh is 1 - tanh instead of 1 - tanh²."""
    right = rows.capped

    def capped(x, softcap):
        y, slope = right(x, softcap)
        return y, None if slope is None else 1 - y / softcap

    return replaced(right, capped)


@found_by("losses/test_cross_entropy.py")
def backward_at_temperature_1():
    def ones(reading, like):
        return None if reading.at_temperature_1 else torch.ones_like(like)

    return mock.patch.object(stats_bwd, "inverse_temperature", ones)


# --- rows that are ignored or weighted


@found_by("losses/test_cross_entropy.py")
def mean_over_all_rows():
    """A mean divides by the number of rows, although some are ignored."""
    right = rows.share

    def share(reading, *how):
        return right(reading._replace(ignore_index=None), *how)

    return replaced(right, share)


@found_by("losses/test_cross_entropy.py")
def ignored_rows_in_backward():
    return mock.patch.object(stats_bwd, "live_rows", return_value=None)


@found_by("losses/test_cross_entropy.py")
def gradient_without_row_weight():
    right = rows.reduce

    def reduce(value, reading, row_weight=None, mass=None, mean=False):
        total, _ = right(value, reading, row_weight, mass, mean)
        return total, right(value, reading, None, mass, mean)[1]

    return replaced(right, reduce)


@found_by("differential/test_differential.py")
def row_weight_unchecked_over_a_head():
    right = tensor_checks._rows

    def _rows(name, t, x):
        if isinstance(x, Tensor) or name != "row_weight":
            right(name, t, x)

    return replaced(right, _rows)


@found_by("core/test_tensor_checks.py")
def target_of_v():
    """A target of V, one past the last class, passes the check."""
    right = target_checks.in_range

    def in_range(ids, vocab, *how):
        right(ids, vocab + 1, *how)

    return replaced(right, in_range)


@found_by("core/test_in_place.py")
def silent_overwrite():
    """Autograd is not told that a loss has overwritten its logits."""
    return mock.patch("torch.autograd.graph.increment_version")


# --- heads


@found_by("differential/test_differential.py")
def chunks_off_by_one():
    """Every chunk of a head but the first takes the rows one before its own."""
    right = choose_cut.bounds

    def bounds(*how):
        return [(a - 1, b - 1) if a else (a, b) for a, b in right(*how)]

    return replaced(right, bounds)


@found_by("losses/test_group_loss.py")
def groups_of_one_length():
    """The rows of a group are found as if all groups had the length of the first."""

    def rows_of(self, some):
        return slice(some.start * self.sizes[0], some.stop * self.sizes[0])

    return mock.patch.object(Groups, "rows_of", rows_of)


@found_by("losses/test_group_loss.py")
def left_out_rows_at_the_end():
    """In a chunk of whole groups, the rows that count are taken for the first ones."""
    right = run.Chunks.pieces

    def pieces(self, loss):
        if self.groups is not None:
            self.taken = [
                (some, groups, None if present is None else torch.arange(len(present)))
                for some, groups, present in self.taken
            ]
        return right(self, loss)

    return mock.patch.object(run.Chunks, "pieces", pieces)


@found_by("heads/test_run.py")
def frozen_head_unscaled():
    """Over a frozen head, backward forgets the upstream gradient."""
    right = run.scaled_rows

    def scaled_rows(head_call, ones, upstream):
        of_one = (None if g is None else torch.ones_like(g) for g in upstream)
        return right(head_call, ones, tuple(of_one))

    return replaced(right, scaled_rows)


@found_by("heads/test_run.py")
def kept_logits_read_twice():
    """A second backward reads the saved logits, which the first overwrote with their gradient."""
    never: Any = property(lambda ctx: False, lambda ctx, value: None)
    return mock.patch.object(run.HeadLoss._backward_cls, "overwritten", never, create=True)


@found_by("heads/test_run.py")
def adapter_columns():
    """The columns of an adapter begin one too early."""

    def two_parts(t, weight, low_rank):
        width, rank = weight.shape[1], low_rank.shape[1]
        return t[..., :width], t[..., width - 1 : width - 1 + rank]

    return replaced(gemms.two_parts, two_parts)


@found_by("core/test_invariant.py")
def invariant_gemm_by_rows():
    """The order of a sum over hidden depends on the number of rows."""

    def by_rows(a, b, out, bias=None, transposed=False):
        b = b.t() if transposed else b
        order = torch.randperm(a.shape[1]) if len(a) > 2 else torch.arange(a.shape[1])
        torch.mm(a[:, order], b[order], out=out)
        return out if bias is None else out.add_(bias)

    stack = replaced(eager.row_gemm, by_rows)
    stack.enter_context(mock.patch("logitless.heads.head.computes_single_rows", return_value=False))
    return stack


# --- other losses, ranks, lazy logits, the store


@found_by("kernels/test_topk.py")
def tail_with_the_last_slot():
    """The mass outside the top k includes the k-th id."""
    right = eager.topk

    def topk(*how):
        ids, logprobs, tail = right(*how)
        return ids, logprobs, torch.logaddexp(tail, logprobs[..., -1])

    return replaced(right, topk)


@found_by("losses/test_sampled_softmax.py")
def hits_counted():
    """A negative that is the row's own target stays in the sum."""
    right = sampled_softmax._distinct

    def distinct(*how):
        ids, log_q, column = right(*how)
        return ids, log_q, torch.full_like(column, sampled_softmax.NO_HIT)

    return replaced(right, distinct)


@found_by("contrastive/test_info_nce.py")
def masked_pairs_counted():
    right = contrastive._logits
    return replaced(right, lambda x, block: right(x, block._replace(mask=None)))


@found_by("parallel/test_shard.py")
def columns_of_the_first_rank():
    """Every rank takes its columns for the first of the vocabulary."""
    right = ColumnBackend.partial

    def partial(self, x, reading, start=0):
        return right(self, x, reading, start - self.start)

    return mock.patch.object(ColumnBackend, "partial", partial)


@found_by("lazy/test_views.py")
def lazy_columns_from_0():
    """Some columns of lazy logits begin at column 0."""
    right = lazy_rows._selected

    def selected(z, lead, last):
        if isinstance(last, slice):
            begin, end, step = last.indices(z.shape[-1])
            last = slice(0, max(end - begin, 0), step)
        return right(z, lead, last)

    return replaced(right, selected)


@found_by("lazy/test_writes.py")
def unseen_step():
    """Lazy logits do not notice an optimiser's step that writes to the weight through `.data`."""
    return mock.patch.object(Watch, "differs", return_value=False)


@found_by("store/test_format.py")
def codes_off_by_one():
    right = store_codes._in_units

    def in_units(below, unit):
        near, far = right(below, unit)
        return torch.where(near < store_codes.NEAR, near + 1, near), far

    return replaced(right, in_units)


@found_by("store/test_damage.py")
def changed_rows_unseen():
    """The checksums of rows are not compared."""
    return mock.patch.object(store_shard.Shard, "_damaged", return_value=None)


# --- the command


def first_failure(tests: Iterable[str], *options: str) -> str:
    """The first test that fails, or "" if all pass."""
    fixed = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", "--few")  # as in `make test`
    command = [sys.executable, "-m", "pytest", *fixed, *options, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        raise SystemExit(f"A mutant must be one of {', '.join(MUTANTS)}, got {unknown[0]}.")
    found = set()
    names, missed = names or [*MUTANTS], 0
    for name in names:
        begin = time.monotonic()
        files = [f"tests/{file}" for file in MUTANTS[name].tests]
        test = first_failure(files, "--mutant", name)
        missed += not test
        found |= {test} - {""}
        seconds = time.monotonic() - begin
        print(f"{name:33} {seconds:4.0f} s  {test or 'NOT FOUND'}", flush=True)
    wrong = first_failure(sorted(found)) if found else ""
    if wrong:
        print(f"{wrong} fails without a mutant too: it has found nothing.")
    print(f"{len(names) - missed} of {len(names)} found")
    return int(missed > 0 or bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
