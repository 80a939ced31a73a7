"""Pictures of a result, two a family of cases: how fast, and how much memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .cases import COMPILED, EAGER, OURS, PLAIN, Mode
from .contenders import NAMES
from .runner import Result

GREYS = ("#c9ced6", "#9aa5b1", "#7fb7be", "#4f7cac", "#33658a", "#2f4858", "#86a873")  # rivals
REDS = ("#d1495b", "#7d1d3f", "#edae49", "#a26769")  # ours: plain, and what stands beside it
LABELS = {EAGER: "PyTorch eager", COMPILED: "torch.compile", "liger": "Liger"}
PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind a number on the ceiling


class Bar(NamedTuple):
    panel: str
    group: str
    name: str
    height: float


def save(document: dict, folder: Path) -> list[Path]:
    """Writes the pictures that have something to show, and returns their paths."""
    C, made = document["copy_tbps"], []
    ceiling = f"floor / time, % (a copy moves {C or 0:.2f} TB/s), higher is better"
    speed = ("speed", "speed, PyTorch eager = 1, higher is better", 1)
    memory = ("memory", "GiB allocated beyond the inputs, lower is better", None)
    where = f"{document['device']['name']}, torch {document['versions']['torch']}"
    timed = [r for row in document["rows"] if (r := Result(**row)).ms and r.contender in NAMES]
    together = Counter(r.key for r in timed)
    for family in dict.fromkeys(r.family for r in timed):
        for file, title, line in (("share-of-ceiling", ceiling, 100) if C else speed, memory):
            shown = [r for r in timed if r.family == family and is_shown(r, together[r.key])]
            if bars := [bar for r in shown if (bar := bar_of(r, file))]:
                made.append(folder / f"{file}{'' if family == 'logits' else f'-{family}'}.png")
                draw(bars, f"{family}: {title}\n{where}", line, made[-1])
    return made


def is_shown(r: Result, contenders: int) -> bool:
    """With a teacher what has rivals; else cross_entropy, and a head in other workspaces too."""
    if r.family == "heads" and r.variant.endswith(" MiB"):
        return True
    chosen = r.family == "teachers" or (r.op, r.variant) == ("cross_entropy", PLAIN)
    return chosen and r.mode != Mode.WALL and (contenders > 1 or r.mode == Mode.INPLACE)


def bar_of(r: Result, file: str) -> Bar | None:
    """Memory is in one panel, our in-place form beside the default one."""
    panel, name = r.mode, r.contender
    if r.family == "heads" and r.variant != PLAIN:
        name = f"{OURS}, {r.variant}"
    if file == "memory" and r.mode == Mode.INPLACE and r.contender == OURS:
        panel, name = Mode.BACKWARD, f"{OURS}, in place"
    height = r.floor_ms and r.ms and 100 * r.floor_ms / r.ms
    if file == "memory":
        height = (r.extra_mib or 0.0) / 1024 if panel == Mode.BACKWARD else None
    elif file == "speed":
        height = r.eager_x and 1 / r.eager_x
    what = f"{r.work}\n" if r.family == "teachers" else ""
    return Bar(panel, f"{what}{r.shape}\n{r.dtype}", name, height) if height else None


def draw(bars: list[Bar], title: str, line: float | None, path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    present = list(dict.fromkeys(bar.name for bar in bars))
    ours = [name for name in present if name.startswith(OURS)]
    names = [name for name in NAMES[1:] if name in present] + ours
    colors = dict(zip((*NAMES[1:], *ours), (*GREYS, *REDS), strict=False))
    panels = list(dict.fromkeys(bar.panel for bar in bars))
    figure = Figure(figsize=(9, 2.5 * len(panels) + 1.1))
    for axis, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        heights = {(bar.group, bar.name): bar.height for bar in bars if bar.panel == panel}
        groups = list(dict.fromkeys(group for group, _ in heights))
        width = 0.84 / len(names)
        for i, name in enumerate(names):  # one that failed leaves its place empty
            at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(groups))]
            values = [heights.get((group, name), 0.0) for group in groups]
            drawn = axis.bar(at, values, width * 0.94, color=colors[name])
            if name in ours:
                axis.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2, bbox=PATCH)
        if line:
            axis.axhline(line, color="#333333", linewidth=0.8, linestyle="--", zorder=0)
        axis.set_xticks(range(len(groups)), groups, fontsize=8)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(panel, fontsize=10, loc="left")
    handles = [drawn[0] for drawn in figure.axes[0].containers]  # one set of bars a name
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    labels = [LABELS.get(name, name) for name in names]
    figure.legend(handles, labels, ncols=5, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=160)
