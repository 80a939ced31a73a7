"""Draws the results of each family of cases: one plot of speed and one plot of memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .cases import COMPILED, EAGER, OURS, PLAIN, Mode
from .contenders import NAMES
from .results import Result

GREYS = ("#c9ced6", "#9aa5b1", "#7fb7be", "#4f7cac", "#33658a", "#2f4858", "#86a873")  # rivals
REDS = ("#d1495b", "#7d1d3f", "#edae49", "#a26769")  # ours: the default, and variants
LABELS = {EAGER: "PyTorch eager", COMPILED: "torch.compile", "liger": "Liger"}
PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # background of the numbers
LEAST_MIB = 0.1  # smaller values are drawn as this, because the scale is logarithmic
Bars = dict[tuple[str, str, str], float]  # heights by panel, group and name


def save(document: dict, folder: Path) -> list[Path]:
    """Writes the plots that are not empty, and returns their paths."""
    paths, where = [], f"{document['device']['name']}, torch {document['versions']['torch']}"
    timed = [r for r in document["rows"] if r.ms and r.contender in NAMES]
    together = Counter(r.name for r in timed)
    for family in dict.fromkeys(r.family for r in timed):
        shown = [r for r in timed if r.family == family and is_shown(r, together[r.name])]
        heads, suffix = family == "heads", "" if family == "logits" else f"-{family}"
        if document["copy_tbps"]:
            best = "its GEMMs alone" if heads else "its bytes at the bandwidth of a copy"
            unit = f"% of the fastest possible, higher is better: 100 is {best}"
            shares = {place(r): 100 * r.floor_ms / r.ms for r in shown if r.floor_ms}
            speed = ("share-of-ceiling", unit, 100, shares)
        else:
            times = {place(r): 1 / r.eager_x for r in shown if r.eager_x}
            speed = ("speed", "speed, PyTorch eager = 1, higher is better", 1, times)
        beyond = "inputs and the gradients" if heads else "inputs"
        unit = f"memory allocated beyond the {beyond}, MiB, lower is better"
        taken = {place(r, True): r.spare_mib if heads else r.extra_mib for r in shown}
        taken = {k: mib for k, mib in taken.items() if k[0] == Mode.BACKWARD and mib is not None}
        for file, label, line, bars in (speed, ("memory", unit, None, taken)):
            if bars:
                paths.append(folder / f"{file}{suffix}.png")
                draw(bars, f"{family}: {label}\n{where}", line, paths[-1])
    return paths


def is_shown(r: Result, contenders: int) -> bool:
    """Whether a result is plotted.

    The plots show plain cross_entropy, heads in all workspaces, and ops with a teacher. An op with
    a teacher is plotted only if several contenders have the op.
    """
    if r.family == "heads" and r.variant.endswith(" MiB"):
        return True
    chosen = r.family == "teachers" or (r.op, r.variant) == ("cross_entropy", PLAIN)
    return chosen and r.mode != Mode.WALL and (contenders > 1 or r.mode == Mode.INPLACE)


def place(r: Result, one_panel: bool = False) -> tuple[str, str, str]:
    """Panel, group and name of a result. With one_panel, our results in place share a panel."""
    panel, name = r.mode, r.contender
    if r.family == "heads" and r.variant != PLAIN:
        name = f"{OURS}, {r.variant}"
    if one_panel and (panel, name) == (Mode.INPLACE, OURS):
        panel, name = Mode.BACKWARD, f"{OURS}, in place"
    work = f"{r.work}\n" if r.family == "teachers" else ""
    return panel, f"{work}{r.shape}\n{r.dtype}", name


def draw(bars: Bars, title: str, line: float | None, path: Path) -> None:
    """Draws groups of bars, each with its number. The scale is logarithmic if `line` is None."""
    from matplotlib.figure import Figure  # pyplot would need a display and global state

    panels, present = (list(dict.fromkeys(place[i] for place in bars)) for i in (0, 2))
    ours = [name for name in present if name.startswith(OURS)]
    names = [name for name in NAMES[1:] if name in present] + ours
    colors = dict(zip((*NAMES[1:], *ours), (*GREYS, *REDS), strict=False))
    base, width = 0.0 if line else LEAST_MIB / 2, 0.84 / len(names)
    figure = Figure(figsize=(11, 2.7 * len(panels) + 1.1))
    for axis, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        groups = list(dict.fromkeys(place[1] for place in bars if place[0] == panel))
        for i, name in enumerate(names):  # a contender that failed leaves a gap
            at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(groups))]
            values = [bars.get((panel, group, name)) for group in groups]
            tall = [0.0 if v is None else max(v, 2 * base) - base for v in values]
            drawn = axis.bar(at, tall, width * 0.94, bottom=base, color=colors[name])
            labels = ["" if v is None else amount(v) for v in values]
            weight = "bold" if name in ours else "normal"
            style = {"fontsize": 7, "padding": 2, "rotation": 90, "bbox": PATCH, "weight": weight}
            axis.bar_label(drawn, labels, **style)
        if line:
            axis.axhline(line, color="#333333", linewidth=0.8, linestyle="--", zorder=0)
            axis.margins(y=0.25)
        else:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_ylim(base, max(bars.values()) * 12)
        axis.set_xticks(range(len(groups)), groups, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(panel, fontsize=10, loc="left")
    handles = [drawn[0] for drawn in figure.axes[0].containers]  # one set of bars per name
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    labels = [LABELS.get(name, name) for name in names]
    figure.legend(handles, labels, ncols=5, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=160)


def amount(value: float) -> str:
    """A number in two or three digits, or as a whole number from 100 on: 0.09, 12.3, 2004."""
    if value < 0.01:
        return "0"
    return f"{value:.2g}" if value < 1 else f"{value:.3g}" if value < 100 else f"{value:.0f}"
