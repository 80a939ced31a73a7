"""report() lists what was materialised, and where; large logits warn once per place."""

import inspect
import threading
import warnings

import pytest
import torch

import logitless as ll
from logitless.lazy import recipe, report
from tests.support.lazy_models import B, T, V, model

SIZE = B * T * V * 8


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(recipe, "SMALL", 0)
    monkeypatch.setattr(report, "_warned", set())
    monkeypatch.delenv("LOGITLESS_WARN_BYTES", raising=False)
    ll.report()


def logits(x, m=None):
    with torch.no_grad():
        return (m or model(True, x.device))(x)


def line_of(function, offset):
    return f"{__file__}:{inspect.getsourcelines(function)[1] + offset}"


def test_records(x):
    for rows in (1, 2, 1):
        logits(x[:rows]).cumsum(-1)
    logits(x)[:, -1].sort()
    logits(x).argmax(-1)  # materialises nothing
    logits(x).materialize()
    found = ll.report()
    assert [(r.operation, r.shape, r.bytes, r.count) for r in found] == [
        ("Tensor.cumsum", (B, T, V), SIZE, 3),
        ("materialize", (B, T, V), SIZE, 1),
        ("Tensor.sort", (B, V), SIZE // T, 1),
    ]
    assert [r.line for r in found] == [line_of(test_records, n) for n in (2, 5, 3)]
    text = f"Tensor.cumsum  (2, 5, 11)  880 bytes  3 times  {found[0].line}"
    assert str(found).splitlines()[0] == repr(found).splitlines()[0] == text
    assert ll.report() == []
    assert str(ll.report()).startswith("No lazy logits were materialised.")


def test_values_are_counted_once(x):
    z = logits(x)
    for _ in range(3):
        z.cumsum(-1)
        z.numpy(force=True)
        z[:, 1:].sort()
    assert [r.count for r in ll.report()] == [1]


def test_of_one_model(x):
    a, b = model(True, x.device), model(True, x.device)
    for m in (a, b, b):
        logits(x, m).cumsum(-1)
    assert [r.count for r in ll.report(b)] == [2]
    assert ll.report(b) == []
    assert [r.count for r in ll.report()] == [1]
    with pytest.raises(TypeError, match=r"model must be an nn\.Module or None, got list"):
        ll.report([a])


def test_threads_and_a_bounded_number_of_records(x, monkeypatch):
    z = [logits(x) for _ in range(40)]
    threads = [threading.Thread(target=t.cumsum, args=(-1,)) for t in z]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(r.count for r in ll.report()) == 40
    monkeypatch.setattr(report, "PLACES", 3)
    for name in ("cumsum", "sort", "msort", "cumprod", "flip"):
        getattr(logits(x), name)(*((-1,) if name.startswith(("cum", "flip")) else ()))
    assert {r.operation for r in ll.report()} == {"Tensor.msort", "Tensor.cumprod", "Tensor.flip"}


def seen(act) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in said]


def test_large_logits_warn_once_per_place(x, monkeypatch):
    def two():
        for _ in range(2):
            logits(x).cumsum(-1)
        logits(x).cumsum(-1)
        logits(x)[:, -1].cumsum(-1)

    assert seen(two) == []
    monkeypatch.setattr(report, "LIMIT", SIZE - 1)
    first, second = seen(two)
    assert first.startswith(
        f"logits of a fused head are materialised by Tensor.cumsum, at {line_of(two, 2)}. The"
        " materialised logits have the shape (2, 5, 11) and take 880 bytes. The logits stay lazy if"
    )
    assert f"at {line_of(two, 3)}." in second
    assert seen(two) == []
    assert seen(lambda: logits(x).materialize()) == []


@pytest.mark.parametrize(
    ("limit", "inference", "training"),
    [(None, 0, 1), ("off", 0, 0), (" OFF ", 0, 0), ("0", 1, 1), (str(SIZE), 0, 0)],
)
def test_the_variable_sets_one_limit(limit, inference, training, x, monkeypatch):
    if limit is not None:
        monkeypatch.setenv("LOGITLESS_WARN_BYTES", limit)
    trained = model(True, x.device)(x)
    assert len(seen(lambda: logits(x).cumsum(-1))) == inference
    assert len(seen(lambda: trained.cumsum(-1))) == training


@pytest.mark.parametrize("limit", ["1G", "-1", "no"])
def test_a_bad_limit_raises(limit, x, monkeypatch):
    monkeypatch.setenv("LOGITLESS_WARN_BYTES", limit)
    with pytest.raises(ValueError, match="LOGITLESS_WARN_BYTES must be a number of bytes or 'off'"):
        logits(x).cumsum(-1)


def test_the_line_is_the_users(x, monkeypatch):
    """Not a line of a library through which the user's code reads the logits."""
    code = compile("def read(z):\n    return z.cumsum(-1)", "/lib/known/inner.py", "exec")
    names = {}
    exec(code, names)
    names["read"](logits(x))
    (inner,) = ll.report()
    assert inner.line == "/lib/known/inner.py:2"
    monkeypatch.setattr(report, "_libraries", lambda: ("/lib/known/",))
    names["read"](logits(x))
    (found,) = ll.report()
    assert found.line == line_of(test_the_line_is_the_users, 9)


@pytest.mark.parametrize(
    ("size", "text"), [(880, "880 bytes"), (1 << 20, "1.0 MiB"), (42_200_000_000, "39.3 GiB")]
)
def test_sizes(size, text):
    assert report.in_units(size) == text
