"""`use_in_trl` lets TRL's trainers compute losses and metrics with functions of this library.

Most trainers of TRL do not call the model's head. TRL has its own fused head, which consists of two
autograd functions: one returns log-probabilities, entropies and other statistics of tokens, and the
other returns divergences from a teacher. A `Switch` replaces each function while the forward of an
adapted model, or the loss of an adapted trainer, is computed. All other code of TRL runs unchanged.

Other trainers of TRL compute log-probabilities from the logits of the model. On a GPU, they call a
kernel of TRL, which would materialise lazy logits. So a `LogitsSwitch` replaces the kernel during
the steps of an adapted trainer: for lazy logits, it calls this library.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..core.call import named
from ..lazy.checks import kind_of, options_of_fuse
from ..lazy.fuse import GUARD, Guard, named_head
from ..lazy.fused_head import is_lazy
from ..lazy.linear_logits import LinearLogits
from .token_gradients import Ways
from .trl_rehearsal import STEP, rehearsed
from .trl_statistics import (
    Call,
    divergences,
    gkd_loss,
    logprobs_and_entropies,
    token_statistics,
)

T = TypeVar("T")

# Keys in the `__dict__` of an adapted model or trainer. `USE` has a `Use`. `SET` maps the name of a
# replaced attribute to (our function, old value). Our functions have the attribute `SET` too.
USE, SET = "_logitless_trl", "_logitless_trl_set"
# TRL's names of two autograd functions, a kernel, and the functions that call the kernel.
STATISTICS, DIVERGENCES = "_ChunkedLogProbFunction", "ChunkedDivergenceFunction"
KERNEL = "_fused_logprob_entropy"
OVER_LOGITS = (
    "selective_log_softmax", "selective_log_softmax_and_entropy", "entropy_from_logits",
)  # fmt: skip
# The method of a trainer that computes its loss from the results of the fused head.
LOSS = "_compute_loss"
# The methods of a trainer in which the kernel is called.
STEPS = ("training_step", "prediction_step", "compute_loss")


@named(LinearLogits.__init__)
def use_in_trl(model: T, **options) -> T:
    """Changes a trainer of TRL to compute losses and metrics with logitless, and returns it.

    `model` is a trainer of TRL: SFT, DPO, KTO, GRPO, RLOO, distillation, GKD, ORPO, CPO or TPO. A
    trainer's reference model is adapted too. `model` can also be a model to which TRL's
    `add_fused_lm_head` was applied. `options` are options of LinearLogits. If the model is fused,
    options that are not passed here have their values from the call of `fuse`. Calling `use_in_trl`
    again changes the options, and `unuse_in_trl` undoes `use_in_trl`.

    The losses, gradients and logged metrics are the same as TRL's, except for rounding. GKD, ORPO,
    CPO and TPO read the logits of their models. So these models must be fused (`ll.fuse`).

    The losses of SFT, GRPO, RLOO, DPO, KTO and their subclasses in TRL take three GEMMs over the
    head, and two if the head is frozen. For this, TRL's `_compute_loss` runs several times per
    step, on copies of the trainer, so that the gradients are known while the logits are in memory.
    Backward compares them with the gradients that TRL's loss then has. If they differ, backward
    computes the exact gradients, which takes up to four GEMMs more in this step.

    >>> trainer = use_in_trl(SFTTrainer(model, arguments, train_dataset=data))
    >>> trainer.train()
    """
    _check_installed()
    options_of_fuse(options)
    places = list(_places(model))
    if not places:
        raise _nothing_to_adapt(model)
    way = "rows" if any(place.wrap is _adapted_loss for place in places) else _way(model)
    use = Use(options, Ways(way))
    for place in places:
        if not place.is_set():
            place.set()
        place.owner.__dict__[USE] = use
    return model


def unuse_in_trl(model: T) -> T:
    """Undoes `use_in_trl`. Afterwards, TRL's own functions are called again."""
    _check_installed()
    for owner in _owners(model):
        owner.__dict__.pop(USE, None)
        for name, (ours, below) in owner.__dict__.pop(SET, {}).items():
            # If other code has wrapped our function, our function cannot be removed. The key `USE`
            # is removed above, so our function then only calls TRL's function.
            if owner.__dict__.get(name) is ours:
                del owner.__dict__[name]
                if below is not None:
                    owner.__dict__[name] = below
    return model


class OnlyFuseNeededError(TypeError):
    """The trainer reads the logits of its model: `fuse` does all, and `use_in_trl` nothing."""


class Use:
    """The settings of one call of `use_in_trl`. Copies of a model share the `Use` of the model."""

    def __init__(self, options: dict, ways: Ways):
        self.options, self.ways = options, ways

    def __deepcopy__(self, _memo: dict) -> "Use":
        return self


_call: ContextVar[Call | None] = ContextVar("call", default=None)


class Switch:
    """Replaces a global variable of TRL, an autograd function, inside `with switch.on()`.

    In another thread, whose model is not adapted, `apply` still calls TRL's function.
    """

    def __init__(self, names: dict, name: str, ours: Callable):
        self.names, self.name, self.ours = names, name, ours  # `names` are globals of a module

    @contextmanager
    def on(self) -> Iterator[None]:
        before = self.names[self.name]
        if isinstance(before, Switch):  # calls can be nested
            yield
            return
        self.original = before
        try:
            self.names[self.name] = self
            yield
        finally:
            self.names[self.name] = before

    def apply(self, *args):
        call = _call.get()
        return self.original.apply(*args) if call is None else self.ours(call, *args)


class LogitsSwitch(Switch):
    """Replaces a function of TRL that takes logits. Lazy logits are passed to this library."""

    def __call__(self, logits, *args, **kwargs):
        return (self.ours if is_lazy(logits) else self.original)(logits, *args, **kwargs)


class Place(NamedTuple):
    owner: Any
    name: str
    wrap: Callable  # (old function, whether it is a method) → new method

    def is_set(self) -> bool:
        """False again after another trainer of the same model has set its own forward."""
        return any(hasattr(each, SET) for each in _layers(getattr(self.owner, self.name)))

    def set(self) -> None:
        before = getattr(self.owner, self.name)
        is_method = isinstance(before, types.MethodType)
        function = self.wrap(before.__func__ if is_method else before, is_method)
        function.__dict__[SET] = True
        ours, own = types.MethodType(function, self.owner), self.owner.__dict__
        own.setdefault(SET, {})[self.name] = (ours, own.get(self.name))
        own[self.name] = ours


# --- the functions of TRL


def _places(model: Any) -> Iterator[Place]:
    heads = False
    for owner in _owners(model):
        if not isinstance(owner, nn.Module):
            yield from _places_of_trainer(owner)
            continue
        function = _trl_forward(owner)
        if function is not None and _calls_fused_head(model):
            switch = Switch(function.__globals__, STATISTICS, token_statistics)
            yield Place(owner, "forward", partial(_adapted_forward, switch))
            heads = True
    function = getattr(type(model), LOSS, None)
    # Only TRL's own code is called several times.
    ours = function is not None and function.__module__.startswith("trl.")
    if heads and ours and DIVERGENCES not in function.__globals__:
        yield Place(model, LOSS, _adapted_loss)


def _places_of_trainer(trainer: Any) -> Iterator[Place]:
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    loss = getattr(type(trainer), LOSS, None)
    if DIVERGENCES in getattr(loss, "__globals__", ()):
        switch = Switch(loss.__globals__, DIVERGENCES, divergences)
        yield Place(trainer, LOSS, partial(_adapted_distillation, switch))
    if any(kind.__name__ == "GKDTrainer" for kind in kinds):
        yield Place(trainer, "generalized_jsd_loss", _adapted_gkd)
    names = [vars(sys.modules[kind.__module__]) for kind in kinds]
    functions = (each[name] for each in names for name in OVER_LOGITS if name in each)
    over_logits = next((f for f in functions if KERNEL in f.__globals__), None)
    if over_logits is not None:
        switch = LogitsSwitch(over_logits.__globals__, KERNEL, logprobs_and_entropies)
        for name in STEPS:
            yield Place(trainer, name, partial(_adapted_step, switch))


def _owners(model: Any) -> Iterator[Any]:
    models = (model,)
    if not isinstance(model, nn.Module):
        yield model
        models = (getattr(model, "model", None), getattr(model, "ref_model", None))
    for each in models:
        if isinstance(each, nn.Module):
            yield from each.modules()


def _trl_forward(module: nn.Module) -> Any:
    """Returns the forward that `add_fused_lm_head` set on a module, without wrappers, or None."""
    for function in _layers(module.__dict__.get("forward")):
        code = getattr(function, "__code__", None)
        if "fused_lm_head" in _words(code) and STATISTICS in function.__globals__:
            return function
    return None


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _calls_fused_head(model: Any) -> bool:
    """Whether the trainer calls TRL's fused head. Only some subclasses of SFTTrainer do not."""
    from trl import SFTTrainer  # it takes this file for trl

    if not isinstance(model, SFTTrainer):
        return True
    for kind in type(model).__mro__:
        function = kind.__dict__.get("compute_loss")
        if function is None:
            continue
        words = _words(inspect.unwrap(function).__code__)
        if kind is SFTTrainer or "fused_lm_head" in words:
            return True
        if "compute_loss" not in words:  # the method does not call super().compute_loss
            return False
    return False


def _words(code: types.CodeType | None) -> set[str]:
    """The names in a function's code: variables, attributes, and the keywords of calls."""
    if code is None:
        return set()
    # The keywords of a call are one tuple in `co_consts`, or, beside `**arguments`, single strings.
    groups = [c if isinstance(c, tuple) else (c,) for c in code.co_consts]
    keywords = {word for words in groups for word in words if isinstance(word, str)}
    return {*code.co_varnames, *code.co_names} | keywords


@contextmanager
def _computed_by_us(switch: Switch, use: Use, model: nn.Module, **how) -> Iterator[None]:
    """Inside this context manager, TRL calls `switch`, and `switch` calls this library."""
    guard = _guard_of(model)
    options = use.options if guard is None else {**guard.options, **use.options}
    token = _call.set(Call(options, **how))
    try:
        with switch.on():
            yield
    finally:
        _call.reset(token)
        if guard is not None:
            guard.called(None)


def _guard_of(model: nn.Module) -> Guard | None:
    """Returns the `Guard` (lazy/fuse.py) of a fused model, also inside PEFT, or None."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore
    guards = [g for each in (model, inner) for g in each.__dict__.get(GUARD, ()) if g.active]
    if len(guards) < 2:
        return next(iter(guards), None)
    # Of several fused heads, TRL reads the output embeddings.
    read = getattr(named_head(inner, None), "__dict__", {}).get(GUARD, ())
    return next((guard for guard in guards if guard in read), None)


def _adapted_forward(switch: Switch, below: Callable, is_method: bool) -> Callable:
    """Returns a forward whose results of TRL's fused head are computed by logitless."""

    # `generate` checks its arguments against the signature of `below`.
    @functools.wraps(below)
    def forward(self, *args, **kwargs):
        given = (self, *args) if is_method else args
        use = self.__dict__.get(USE)
        if use is None or not kwargs.get("fused_lm_head"):
            return below(*given, **kwargs)
        shifted = kwargs.get("shift_labels")
        tokens = kwargs["labels"][:, 1:] if shifted is None else shifted
        step = STEP.get()
        how = {"ways": use.ways, "counts": tokens != -100, "step": step}

        def compute():
            with _computed_by_us(switch, use, self, **how):
                return below(*given, **kwargs)

        return compute() if step is None or torch.is_grad_enabled() else step.forward(compute)

    return forward


def _adapted_loss(below: Callable, _is_method: bool) -> Callable:
    """Returns `_compute_loss`, changed so that the forward of the policy can rehearse the loss."""

    @functools.wraps(below)
    def compute_loss(self, *args, **kwargs):
        use = self.__dict__.get(USE)
        with nullcontext() if use is None else rehearsed(use.ways, below, self, *args, **kwargs):
            return below(self, *args, **kwargs)

    return compute_loss


def _adapted_distillation(switch: Switch, below: Callable, is_method: bool) -> Callable:
    @functools.wraps(below)
    def compute_loss(self, student, *args):
        given = (self, student, *args) if is_method else (student, *args)
        use = self.__dict__.get(USE)
        if use is None:
            return below(*given)
        with _computed_by_us(switch, use, student):
            return below(*given)

    return compute_loss


def _adapted_step(switch: Switch, below: Callable, is_method: bool) -> Callable:
    """Returns a method of a trainer, changed to compute with lazy logits."""

    @functools.wraps(below)
    def step(self, *args, **kwargs):
        with nullcontext() if self.__dict__.get(USE) is None else switch.on():
            return below(*((self, *args) if is_method else args), **kwargs)

    return step


def _adapted_gkd(below: Callable, _is_method: bool) -> Callable:
    @functools.wraps(below)
    def loss(self, *args, **kwargs):
        given = inspect.signature(below).bind(*args, **kwargs).arguments
        if self.__dict__.get(USE) is None or given.pop("reduction", "batchmean") != "batchmean":
            return below(*args, **kwargs)
        return gkd_loss(**given)

    return loss


# --- arguments


def _check_installed() -> None:
    try:
        import trl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"use_in_trl needs trl, but {error.name} is not installed. Run pip install 'trl>=1.16'."
        ) from error


def _way(model: Any) -> str:
    """Returns the fastest way to compute the gradients without rehearsals (token_gradients.py)."""
    from trl import SFTTrainer  # it takes this file for trl

    nll = isinstance(model, SFTTrainer) and model.args.loss_type == "nll"
    return "sum" if nll else "statistics"


def is_of_trl(trainer: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)


def _nothing_to_adapt(model: Any) -> TypeError:
    from transformers import Trainer

    rule = (
        "model must be a trainer of TRL (SFT, DPO, KTO, GRPO, RLOO, distillation, GKD, ORPO, CPO or"
        f" TPO) or a model with TRL's fused head, got {kind_of(model)}"
    )
    if isinstance(model, Trainer):
        return OnlyFuseNeededError(
            f"{rule}, which calls the model's own head. Call ll.fuse on the trainer's model"
            " instead."
        )
    if isinstance(model, nn.Module):
        rule += (
            ", which has no fused head: create the trainer first, and then call use_in_trl(trainer)"
        )
    return TypeError(f"{rule}.")
