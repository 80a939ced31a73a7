"""Every test runs on one device, by each way of computing that it has.

A GPU where there is one; else the CPU, with the kernels under Triton's interpreter. A test that
needs a GPU says for what: `@pytest.mark.gpu("CUDA graphs")`.
"""

import gc
import os
import tempfile

import pytest
import torch

from tests.support.sizes import BLOCK, DEVICE, ON_GPU

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

# A cache of its own: what is compiled depends on code of ours that the cache's key doesn't know.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="logitless-")

import logitless as ll
from logitless.core import call

if not ON_GPU:
    from tests.support import interpreter

    interpreter.make_faster()


def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", help="run every N-th test, and begin with test I")
    parser.addoption("--few", action="store_true", help="few cases of each test, see `few`")
    parser.addoption("--mutant", metavar="NAME", help="a bug of tests/differential/mutations.py")


def pytest_configure(config):
    if config.option.mutant:
        from tests.differential.mutations import MUTANTS

        mutant = MUTANTS[config.option.mutant].plant()
        mutant.__enter__()
        config.add_cleanup(lambda: mutant.__exit__(None, None, None))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.option.few:
        kept = {id(item) for group in by_function(items) for item in few(group)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]
    items.sort(key=lambda item: not forks(item.module))  # first, so one worker starts the server
    if config.option.part:
        first, step = map(int, config.option.part.split("/"))
        items[:] = items[first::step]
    for item in items:
        needs = item.get_closest_marker("gpu")
        if needs is not None and not ON_GPU:
            (reason,) = needs.args
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def forks(module):
    """Whether a test module starts processes with tests/support/forked.py."""
    users = {"tests.support.forked", "tests.support.rank_processes"}
    return any(getattr(value, "__module__", None) in users for value in vars(module).values())


def by_function(items):
    """The items of each test function."""
    groups = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        groups.setdefault((item.parent.nodeid, name), []).append(item)
    return groups.values()


def few(items):
    """The items of a test function that `make test` runs, of all that `make test-all` runs.

    Each value of each parameter occurs, unless the test says @pytest.mark.few(N): then N items.
    """
    kept, limit = covering(items), items[0].get_closest_marker("few")
    return kept if limit is None else kept[:: -(-len(kept) // limit.args[0])]


def covering(items):
    """Few items of a test function in which each value of each of its parameters occurs."""
    values = [
        {(name, id(value)) for name, value in item.callspec.params.items()}
        if hasattr(item, "callspec")
        else {None}
        for item in items
    ]
    missing, kept = set().union(*values), []
    while missing:
        best = max(range(len(items)), key=lambda i: len(values[i] & missing))
        missing -= values[best]
        kept.append(items[best])
    return kept


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=["eager", "triton"])
def impl(request):
    """Run the test by each implementation, chosen explicitly."""
    with ll.impl(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    """Each test starts with an empty cache of checks and plans.

    An earlier test may have patched code that a plan depends on.
    """
    monkeypatch.setattr(call, "_passed", {})


@pytest.fixture
def quick_collections():
    """gc.collect() looks at what the test made alone, and not at all modules of PyTorch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    """Heads are computed in chunks, also the small and narrow heads of tests."""
    from logitless.heads import choose_cut

    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 0))
    monkeypatch.setattr(choose_cut, "ON_CHIP_VOCAB", {})


@pytest.fixture
def small_blocks(impl):
    """Several blocks in a short row, so that blocks merge."""
    from logitless.kernels import config

    with config.override(block_v=BLOCK):
        yield


@pytest.fixture
def checked(monkeypatch):
    """Ids and temperatures are looked at on a GPU too."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")


@pytest.fixture
def nobody_looks(monkeypatch):
    """Ids are not looked at, as on a GPU: a CPU would refuse those out of range."""
    from logitless.core import call as _call

    monkeypatch.setattr(_call, "reads_values", lambda ids: False)
