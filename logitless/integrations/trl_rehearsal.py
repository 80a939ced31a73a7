"""Runs a trainer's loss several times in one step, without anything that others could see.

TRL's `_compute_loss` calls the model, computes the loss from the log-probabilities of the tokens,
and logs metrics. While the head's logits of some tokens are in memory, token_gradients.py needs the
gradients of this loss for these tokens. So `Step.loss` calls TRL's own method again, as a
rehearsal: the model is a stand-in that returns the given log-probabilities. A copy of the trainer
takes the metrics and all other attributes that the method sets, and its accelerator makes no
collective call.

A first rehearsal, before the step, calls the forwards without gradients, such as those of the
reference model. Their results are used again in the step and in all its rehearsals.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .token_gradients import OTHERS, Ways

# Methods of an accelerator. A loss that calls a refused method is not rehearsed.
COLLECTIVES = ("gather", "gather_for_metrics", "reduce")
REFUSED = ("pad_across_processes", "wait_for_everyone", "log")


class Standin:
    """Has the attributes and the class of `of`, except for the given attributes."""

    def __init__(self, of: Any, **own):
        self.__dict__.update(own, of=of)

    @property
    def __class__(self):
        return type(self.of)

    def __getattr__(self, name: str):
        return getattr(self.of, name)

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class Step:
    """One call of `_compute_loss`."""

    def __init__(self, function: Callable, trainer: Any, model: Any, inputs: dict, *more, **named):
        self.function, self.trainer, self.model = function, trainer, model
        self.inputs, self.more, self.named = inputs, more, named
        self.known: list[Any] = []  # the results of forwards without gradients, in their order
        self.gathered: dict[int, Tensor] = {}  # results of collectives on which the loss depends
        self.records = False
        self.replay: Iterator[Any] = iter(())

    def prepare(self) -> bool:
        """Runs the first rehearsal. Returns False if the loss cannot be rehearsed."""
        leaves, collectives = [], []

        def policy(labels=None, shift_labels=None, **kwargs) -> Any:
            labels = labels[:, 1:] if shift_labels is None else shift_labels
            logprob = torch.full(labels.shape, OTHERS, device=labels.device)
            leaves.append(logprob.masked_fill_(labels == -100, 0).requires_grad_())
            return _outputs(leaves[-1], torch.zeros_like(logprob), None, labels != -100)

        def collective(t: Tensor, name: str, args: tuple, kwargs: dict) -> Tensor:
            zeros = torch.zeros(t.shape, dtype=t.dtype)
            if t.is_floating_point():
                zeros.requires_grad_()
            collectives.append((zeros, name, t.detach(), args, kwargs))
            return zeros

        self.records = True
        try:
            loss = self._run(policy, self.model, collective)
        finally:
            self.records = False
        if len(leaves) != 1:
            return False
        floats = [(i, *c) for i, c in enumerate(collectives) if c[0].requires_grad]
        wanted = (leaves[0], *(zeros for _, zeros, *_ in floats))
        g, *used = torch.autograd.grad(loss, wanted, allow_unused=True)
        for d, (i, _, name, t, args, kwargs) in zip(used, floats, strict=True):
            if d is not None:
                self.gathered[i] = getattr(self.trainer.accelerator, name)(t, *args, **kwargs)
        self.replay = iter(self.known)
        return g is not None

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Returns the result of a forward without gradients."""
        if self.records:
            self.known.append(compute())
            return self.known[-1]
        known = next(self.replay, None)
        return compute() if known is None else known

    def loss(
        self, logprob: Tensor, entropy: Tensor, log_sum_sq: Tensor | None, mask: Tensor
    ) -> Tensor:
        """Returns the loss for log-probabilities, entropies and log Σ p² of all tokens (B, T)."""
        known, count = iter(self.known), iter(range(1 << 30))

        def call(*_, **__) -> Any:
            return next(known)

        def policy(**_) -> Any:
            return _outputs(logprob, entropy, log_sum_sq, mask)

        def collective(t: Tensor, *_) -> Tensor:
            found = self.gathered.get(next(count))
            return torch.zeros(t.shape, dtype=t.dtype) if found is None else found

        return self._run(policy, call, collective)

    def _run(self, policy: Callable, below: Callable, collective: Callable) -> Tensor:
        """Runs a rehearsal. `below` computes forwards without gradients."""
        trainer, accelerator = self.trainer, self.trainer.accelerator

        def model(*args, fused_lm_head: bool = False, **kwargs) -> Any:
            if not fused_lm_head:
                raise NotImplementedError("the loss reads the logits of the model")
            if torch.is_grad_enabled():
                return policy(*args, **kwargs)
            return below(*args, fused_lm_head=True, **kwargs)

        def collects(name: str) -> Callable:
            return lambda t, *args, **kwargs: collective(t, name, args, kwargs)

        def refused(*_, **__):
            raise NotImplementedError("ranks rehearse a loss different numbers of times")

        own: dict[str, Any] = {
            "accelerator": Standin(
                accelerator,
                is_main_process=False,  # the main process logs how long methods take
                unwrap_model=lambda m, *args, **kwargs: (
                    m if type(m) is Standin else accelerator.unwrap_model(m, *args, **kwargs)
                ),
                **dict.fromkeys(REFUSED, refused),
                **{name: collects(name) for name in COLLECTIVES},
            )
        }
        if below is not self.model:  # no module is called inside of another call of itself
            for name in ("model", "ref_model"):
                if getattr(trainer, name, None) is not None:
                    own[name] = Standin(
                        getattr(trainer, name), call=model, is_gradient_checkpointing=False,
                        disable_adapter=nullcontext, set_adapter=lambda *_: None,
                    )  # fmt: skip
        shadow = object.__new__(type(trainer))
        shadow.__dict__.update({name: _copied(t) for name, t in trainer.__dict__.items()} | own)
        stands = Standin(self.model, call=model)
        return self.function(shadow, stands, dict(self.inputs), *self.more, **self.named)


STEP: ContextVar[Step | None] = ContextVar("step", default=None)


@contextmanager
def rehearsed(ways: Ways, function: Callable, *args, **kwargs) -> Iterator[None]:
    """Inside, the forward of the policy can rehearse the loss function(*args, **kwargs)."""
    if not (ways.rehearses and torch.is_grad_enabled()):
        yield
        return
    step = Step(function, *args, **kwargs)
    token = STEP.set(step)
    try:
        try:
            ways.can_rehearse = step.prepare()
        except Exception:  # an error of the loss itself is raised again by the step
            ways.can_rehearse = False
        if not ways.can_rehearse:
            STEP.set(None)
        yield
    finally:
        STEP.reset(token)


def _outputs(logprob: Tensor, entropy: Tensor, log_sum_sq: Tensor | None, mask: Tensor) -> Any:
    """The fields of TRL's FusedCausalLMOutput. The metrics of a rehearsal are not used."""
    zeros = torch.zeros_like(logprob)
    return SimpleNamespace(
        log_probs=logprob, entropy=entropy, mean_logits=zeros, is_top1=torch.zeros_like(mask),
        log_sum_sq_probs=zeros if log_sum_sq is None else log_sum_sq, label_mask=mask,
        aux_loss=logprob.new_zeros(()),
    )  # fmt: skip


def _copied(value: Any) -> Any:
    """Copies a container to which a method could append."""
    if type(value) in (dict, defaultdict):
        new = copy.copy(value)
        new.update((key, _copied(each)) for key, each in value.items())
        return new
    return copy.copy(value) if type(value) in (list, deque, set) else value
