"""Draws the results of each family of cases: one plot of speed and one plot of memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from logitless.cli.report import sizes

from .cases import COMPILED, EAGER, OURS, PLAIN, Mode
from .contenders import NAMES
from .results import Result

RIVALS = (EAGER, *(name for name in NAMES if name not in (EAGER, OURS)))  # PyTorch is drawn first
GREYS = ("#c9ced6", "#9aa5b1", "#7fb7be", "#4f7cac", "#33658a", "#2f4858", "#86a873")
REDS = ("#d1495b", "#dc7683", "#e8a4ad", "#f3d1d6")  # colors of logitless and its variants
LABELS = {EAGER: "PyTorch", COMPILED: "torch.compile", "liger": "Liger"}
LABELS |= {"cce": "cut-cross-entropy", "fla": "flash-linear-attention"}
TITLES = {"logits": "Cross-entropy over logits", "heads": "Cross-entropy over a head"}
TITLES |= {"teachers": "Losses with a teacher"}
IN_PLACE = f"{OURS}, in place"
GAP = 1.2  # width of the gap between two groups, in bar widths
LEAST_WIDTH = 4  # a group is at least this many bars wide, so that its label fits


class Bar(NamedTuple):
    """One bar of a plot. If `limit` is not None, a dashed line is drawn at the height `limit`."""

    panel: str
    group: str
    name: str  # a contender, or a variant of logitless
    value: float
    limit: float | None = None


def save(document: dict, folder: Path) -> list[Path]:
    """Writes all plots that have at least one bar, and returns the paths of the plots."""
    paths, where = [], f"{document['device']['name']}, torch {document['versions']['torch']}"
    timed = [r for r in document["rows"] if r.ms and r.contender in NAMES]
    together = Counter(r.name for r in timed)
    for family in dict.fromkeys(r.family for r in timed):
        shown = [r for r in timed if r.family == family and is_shown(r, together[r.name])]
        heads, suffix = family == "heads", "" if family == "logits" else f"-{family}"
        line = "the GEMMs alone" if heads else "the same bytes at the speed of a copy"
        beyond = "inputs and the gradients" if heads else "inputs"
        drawn = (
            ("speed", "speed, PyTorch = 1, higher is better", speeds(shown), line),
            ("memory", f"MiB allocated beyond the {beyond}, lower is better", memory(shown), None),
        )
        for file, unit, bars, line in drawn:
            if bars:
                paths.append(folder / f"{file}{suffix}.png")
                draw(bars, f"{TITLES[family]}: {unit}\n{where}", line, paths[-1])
    return paths


def is_shown(r: Result, contenders: int) -> bool:
    """Returns whether a result is plotted. `contenders` is the number of contenders in the case.

    The plots of logits and heads show `cross_entropy` without options. The plots of heads also show
    `cross_entropy` with every workspace size. The plots of teachers show all cases with several
    contenders.
    """
    if r.family == "heads" and r.variant.endswith(" MiB"):
        return True
    if r.mode == Mode.INPLACE and r.contender != OURS:
        return False
    chosen = r.family == "teachers" or (r.op, r.variant) == ("cross_entropy", PLAIN)
    return chosen and r.mode != Mode.WALL and (contenders > 1 or r.mode == Mode.INPLACE)


def place(r: Result) -> tuple[str, str, str]:
    """Returns the panel, the group and the name of the bar that shows a result.

    In-place results are drawn in the panel of forward + backward.
    """
    mode = Mode.BACKWARD if r.mode == Mode.INPLACE else r.mode
    shape = f"{sizes(r.shape)}\n{r.dtype}"
    if r.family == "teachers":  # one panel shows all modes, because there are few results
        work = "\n".join(f"{r.work}, {mode}".split(", "))
        return "", f"{work}\n{shape}", r.contender
    if r.mode == Mode.INPLACE:
        return mode, shape, IN_PLACE
    variant = "" if r.family == "logits" or r.variant == PLAIN else f", {r.variant}"
    return mode, shape, r.contender + variant


def speeds(shown: list[Result]) -> list[Bar]:
    """Returns bars of speed: PyTorch's time divided by the time of each result.

    In-place results are compared with PyTorch's forward + backward, because PyTorch has no in-place
    losses.
    """
    eager = {place(r)[:2]: r.ms for r in shown if r.contender == EAGER}
    bars = []
    for r in shown:
        panel, group, name = place(r)
        if plain := eager.get((panel, group)):
            drawn = r.floor_ms and r.contender == OURS and r.family != "teachers"
            limit = plain / r.floor_ms if drawn else None
            bars.append(Bar(panel, group, name, plain / r.ms, limit))
    return bars


def memory(shown: list[Result]) -> list[Bar]:
    """Returns bars of the memory that forward + backward takes, in MiB."""
    both = [r for r in shown if r.mode in (Mode.BACKWARD, Mode.INPLACE)]
    taken = [(place(r), r.spare_mib if r.family == "heads" else r.extra_mib) for r in both]
    return [Bar(*where, max(mib, 0.0)) for where, mib in taken if mib is not None]


def draw(bars: list[Bar], title: str, line: str | None, path: Path) -> None:
    """Draws one panel per mode, with groups of bars on a linear scale.

    Dashed lines show `Bar.limit`. `line` is the text for these lines in the legend.
    """
    from matplotlib.figure import Figure  # unlike pyplot, a Figure needs no display

    panels = list(dict.fromkeys(bar.panel for bar in bars))
    present = dict.fromkeys(bar.name for bar in bars)
    ours = [name for name in present if name.startswith(OURS)]
    colors = dict(zip((*RIVALS, *ours), (*GREYS, *REDS), strict=False))
    names = [name for name in colors if name in present]
    figure = Figure(figsize=(11, 2.9 * len(panels) + 1.3))
    handles, ends = {}, []
    for axis, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        here = [bar for bar in bars if bar.panel == panel]
        ends.append(draw_groups(axis, here, names, colors, handles))
        axis.set_title(panel, fontsize=10, loc="left")
        axis.set_ylim(0, 1.2 * max(max(bar.value, bar.limit or 0.0) for bar in here))
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in figure.axes:  # bars are equally wide in all panels
        axis.set_xlim(-1.5, max(ends))
    labels = [label_of(name) for name in names]
    lines = [handles["limit"]] if "limit" in handles else []
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(
        [*(handles[name] for name in names), *lines], [*labels, *([line] if lines else [])],
        ncols=5, loc="lower center", frameon=False, fontsize=9,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=160)


def draw_groups(axis, bars: list[Bar], names: list[str], colors: dict, handles: dict) -> float:
    """Draws the groups of one panel side by side, and returns the right end of the last group."""
    at, ticks, highest = 0.0, {}, max(bar.value for bar in bars)
    crowded = len(bars) > 30 and highest >= 1000  # horizontal numbers would be wider than the bars
    for group in dict.fromkeys(bar.group for bar in bars):
        members = sorted((b for b in bars if b.group == group), key=lambda b: names.index(b.name))
        width = max(len(members), LEAST_WIDTH)
        left = at + (width - len(members)) / 2
        for i, bar in enumerate(members):
            x, ours = left + i, bar.name.startswith(OURS)
            handles.setdefault(
                bar.name, axis.bar([x], [bar.value], 0.94, color=colors[bar.name])[0]
            )
            # A number inside its bar cannot collide with the dashed line above the bar.
            inside = bar.limit is not None and bar.value > 0.2 * highest
            axis.annotate(
                amount(bar.value), (x, bar.value), (0, -14 if inside else 3), fontsize=7,
                textcoords="offset points", ha="center", va="top" if inside else "bottom",
                weight="bold" if ours else "normal", rotation=90 if crowded else 0,
                color="white" if inside and bar.name == OURS else "black",
            )  # fmt: skip
            if bar.limit is not None:
                (limit,) = axis.plot([x - 0.47, x + 0.47], [bar.limit] * 2, "k--", lw=1.2)
                handles.setdefault("limit", limit)
        ticks[at + (width - 1) / 2] = group
        at += width + GAP
    axis.set_xticks([*ticks], [*ticks.values()], fontsize=8)
    return at - GAP + 0.5


def label_of(name: str) -> str:
    """Returns the label of a contender, or of a variant such as "logitless, 64 MiB"."""
    contender, comma, variant = name.partition(", ")
    return LABELS.get(contender, contender) + comma + variant


def amount(value: float) -> str:
    """Formats numbers below 1,000 with at most three digits, and larger numbers with commas.

    Examples are 0.09, 12.3 and 2,004.
    """
    digits = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text
