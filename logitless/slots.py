"""Divergence between a teacher and a student that are known on K slots a row, differentiable.

What every sparse-teacher loss shares: it brings the student's log-probabilities (or, where the
support renormalises them, logits) at the teacher's ids, and gets one number a row. Forward computes
the gradient too, as the slots are in registers then; backward only scales it.
"""

import torch
from torch import Tensor

from ._dispatch import backend
from ._node import is_watched, node, refuse_twice

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
SUPPORTS = ("truncate", "renorm_teacher", "renorm", "tail")


def divergence_over_slots(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    student_tail: Tensor | None,
    teacher_tail: Tensor | None,
    *,
    divergence: str,
    support: str,
    beta: float = 0.5,
) -> Tensor:
    """Σ over the unmasked slots of each row, (..., K) to (...), in fp32 (fp64 for fp64).

    `student` is log q where the support is "truncate", "renorm_teacher" or "tail"; any numbers up
    to a constant a row, logits among them, where it is "renorm" or "gathered", the last of which
    compares p as given with q/Q. `teacher` is log p, and -inf is p = 0.

    For "tail", one more bucket holds the rest of the vocabulary: log masses student_tail (...) and
    teacher_tail (...), which is 1 - P if None; where the student's is -inf there is no bucket. mask
    (..., K), or (...), is True for the slots that count; the others are not read into anything, and
    a row of none is 0.

    Differentiable in student and student_tail; the teacher is a constant.

    >>> q = token_logprobs(logits, ids)
    >>> divergence_over_slots(
    ...     q, teacher, None, None, None, divergence="forward_kl", support="truncate"
    ... )
    """
    assert (student_tail is not None) == (support == "tail")
    value, _, _ = _over_slots(
        student, teacher, mask, student_tail, teacher_tail, divergence, support, float(beta)
    )
    return value


def _slots(student, *args):
    return backend(student).slots(student, *args)


def _slots_op(student, *args):
    value, d_student, d_tail = _slots(student, *args)
    return value, d_student, student.new_empty(0) if d_tail is None else d_tail


def _slots_bwd(x, d_x, d_value):
    """The gradient of x, (..., K) or (...): d_x scaled row by row."""
    return (d_x * (d_value if d_x.dim() == d_value.dim() else d_value.unsqueeze(-1))).to(x.dtype)


def _save(ctx, inputs, output):
    student, _, _, student_tail, *_ = inputs
    _, d_student, d_tail = output
    ctx.save_for_backward(student, student_tail, d_student, d_tail)
    ctx.mark_non_differentiable(*(t for t in (d_student, d_tail) if t is not None))
    ctx.set_materialize_grads(False)


def _backward(ctx, saved, d_value, _, __):
    student, student_tail, d_student, d_tail = saved
    backward = torch.ops.logitless.slots_bwd if is_watched() else _slots_bwd
    gradients = [None] * 8
    if d_value is not None and ctx.needs_input_grad[0]:
        gradients[0] = backward(student, d_student, d_value)
    if d_value is not None and ctx.needs_input_grad[3]:
        gradients[3] = backward(student_tail, d_tail, d_value)
    return tuple(gradients)


# The same as operators, so that torch.compile and opcheck see through them. Without a tail, its
# gradient comes back as an empty tensor: an operator's outputs cannot be None.

_library = torch.library.Library("logitless", "FRAGMENT")
_library.define(
    "slots(Tensor student, Tensor teacher, Tensor? mask, Tensor? student_tail,"
    " Tensor? teacher_tail, str divergence, str support, float beta) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "slots_bwd(Tensor x, Tensor d_x, Tensor d_value) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _slots_fake(student, teacher, mask, student_tail, *args):
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    value = student.new_empty(student.shape[:-1], dtype=dtype)
    d_tail = student.new_empty(0) if student_tail is None else torch.empty_like(value)
    return value, student.new_empty(student.shape, dtype=dtype), d_tail


def _slots_bwd_fake(x, d_x, d_value):
    return torch.empty_like(d_x, dtype=x.dtype)


_library.impl("slots", _slots_op, "CompositeExplicitAutograd")
_library.impl("slots_bwd", _slots_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::slots", _slots_fake, lib=_library)
torch.library.register_fake("logitless::slots_bwd", _slots_bwd_fake, lib=_library)
_over_slots = node("slots", _library, _slots, _save, _backward)
refuse_twice("slots_bwd", _library)
