"""Draws docs/distillation.png: loss, gradient and fitted student of each divergence and support.

    python docs/plot_distillation.py

The vocabulary has 40 tokens. In the upper two rows, the student has the teacher's proportions among
the K ids, and the teacher's proportions among the other tokens. Only the student's mass Q on the K
ids varies. In the lowest row, a student with one peak is fitted to a teacher with two peaks.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import logitless as ll

OUT = Path(__file__).with_name("distillation.png")
DIVERGENCES = {"forward_kl": "forward KL", "reverse_kl": "reverse KL", "jsd": "JSD", "tvd": "TVD"}
SUPPORTS = {  # styles of the curves; two equal curves are both visible because of the dashes
    "truncate": {"color": "C1", "linewidth": 1.4},
    "renorm_teacher": {"color": "C3", "linewidth": 1.4, "linestyle": (0, (5, 2))},
    "renorm": {"color": "0.55", "linewidth": 1.4, "linestyle": (0, (1, 1))},
    "tail": {"color": "C0", "linewidth": 2.2},
}
K = 8


def two_peaks() -> torch.Tensor:
    """log p (40,): a high narrow peak, a low broad one, and a little everywhere."""
    i = torch.arange(40.0, dtype=torch.float64)
    high, low = torch.exp(-((i - 10) ** 2) / 4), torch.exp(-((i - 26) ** 2) / 18)
    p = 0.95 * (0.6 * high / high.sum() + 0.4 * low / low.sum()) + 0.05 / 40
    return p.log()


def mass_path(teacher: torch.Tensor, targets: ll.SparseTargets) -> tuple[torch.Tensor, ...]:
    """The students' mass Q on the ids, and their logits (n, V): the teacher's, the ids shifted."""
    Q = torch.linspace(0.002, 0.998, 499, dtype=torch.float64)
    P = targets.logprobs.exp().sum()
    ids = torch.zeros_like(teacher).index_fill(0, targets.ids[0], 1.0)
    return Q, teacher + (torch.logit(Q) - torch.logit(P)).unsqueeze(-1) * ids


def along(logits: torch.Tensor, targets: ll.SparseTargets, divergence: str, support: str):
    """The loss of each row (n,), and its derivative by the shift of the ids' logits (n,)."""
    logits = logits.clone().requires_grad_()
    rows = targets[torch.zeros(len(logits), dtype=torch.long)]
    loss = ll.topk_distill(logits, rows, divergence=divergence, support=support, reduction="none")
    loss.sum().backward()
    return loss.detach(), logits.grad[:, targets.ids[0]].sum(-1)


def best_single_peak(targets: ll.SparseTargets, divergence: str) -> torch.Tensor:
    """The q (V,) of one peak that comes closest, of a grid of centres and widths."""
    i = torch.arange(40.0, dtype=torch.float64)
    centre = torch.linspace(5, 35, 121, dtype=torch.float64).view(-1, 1, 1)
    width = torch.linspace(0.8, 14, 120, dtype=torch.float64).view(1, -1, 1)
    logits = (-((i - centre) ** 2) / (2 * width**2)).flatten(0, 1)
    loss, _ = along(logits, targets, divergence, "tail")
    return torch.softmax(logits[loss.argmin()], -1)


def draw_mass(above, below, teacher: torch.Tensor, divergence: str) -> None:
    targets = ll.capture_topk(teacher.unsqueeze(0), K)
    Q, logits = mass_path(teacher, targets)
    P = targets.logprobs.exp().sum().item()
    for support, look in SUPPORTS.items():
        loss, slope = along(logits, targets, divergence, support)
        above.plot(Q, loss, label=support, **look)
        below.plot(Q, slope, **look)
        if support != "renorm":  # which is the same everywhere
            at = loss.argmin()
            above.plot(Q[at], loss[at], "o", color=look["color"], markersize=5, clip_on=False)
    for axes in (above, below):
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.axvline(P, color="0.3", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
    above.annotate("P", (P, 1), xycoords=("data", "axes fraction"), xytext=(3, -11),
                   textcoords="offset points", color="0.3")  # fmt: skip
    for axes in (above, below):
        axes.set_xlabel("Q, student's mass on the ids")


def draw_peaks(axes, teacher: torch.Tensor, divergence: str) -> None:
    targets = ll.capture_topk(teacher.unsqueeze(0), 24)
    axes.bar(range(40), teacher.exp(), width=1.0, color="0.8", label="teacher")
    axes.plot(best_single_peak(targets, divergence), color="C0", label="best student of one peak")
    axes.set_xlabel("token")
    axes.set_xticks([])


def main() -> None:
    teacher = two_peaks()
    figure = Figure(figsize=(10, 7.4), layout="constrained")
    rows = figure.subplots(3, 4, sharey="row", height_ratios=(1.1, 1.1, 0.9))
    for column, (divergence, title) in enumerate(DIVERGENCES.items()):
        draw_mass(rows[0, column], rows[1, column], teacher, divergence)
        draw_peaks(rows[2, column], teacher, divergence)
        rows[0, column].set_title(title)
    rows[0, 0].set(ylabel="loss", ylim=(-0.45, 1.4))
    rows[1, 0].set(
        ylabel="gradient: < 0 moves mass to\nthe ids, > 0 away from the ids", ylim=(-1.0, 0.4)
    )
    rows[2, 0].set(ylabel="probability", yticks=[])
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    rows[2, 0].legend(fontsize="small", frameon=False)
    figure.savefig(OUT, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
