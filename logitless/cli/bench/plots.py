"""Two pictures of a result: how close to the ceiling, and how much memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .cases import BACKWARD, FORWARD, INPLACE
from .contenders import COMPILED, EAGER, NAMES, OURS
from .runner import Result

OURS_INPLACE = f"{OURS}, in place"
ORDER = (*NAMES[1:], OURS, OURS_INPLACE)
COLORS = {
    OURS: "#d1495b",
    OURS_INPLACE: "#7d1d3f",
    EAGER: "#c9ced6",
    COMPILED: "#9aa5b1",
    "liger": "#7fb7be",
    "fla": "#4f7cac",
    "flash-attn": "#33658a",
    "quack": "#2f4858",
}
PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind a number on the ceiling
LABELS = {EAGER: "PyTorch eager", COMPILED: "torch.compile", "liger": "Liger"}


class Bar(NamedTuple):
    panel: str
    shape: str
    name: str
    height: float


class Picture(NamedTuple):
    file: str
    title: str
    label: str  # format of the number over our own bars
    ceiling: float | None
    bars: list[Bar]


def save(document: dict, folder: Path) -> list[Path]:
    """Writes both pictures, and returns the paths of those that had something to show."""
    results = [Result(**row) for row in document["rows"]]
    plain = [r for r in results if (r.variant, r.op, r.status) == ("plain", "cross_entropy", "ok")]
    speed = f"share of the copy bandwidth ({document['copy_tbps']:.2f} TB/s), %, higher is better"
    memory = "GiB allocated beyond the logits, lower is better"
    pictures = (
        Picture("share-of-ceiling.png", speed, "%.0f", 100.0, shares(plain)),
        Picture("memory.png", memory, "%.2f", None, memories(plain)),
    )
    where = f"{document['device']['name']}, torch {document['versions']['torch']}"
    return [draw(picture, where, folder) for picture in pictures if picture.bars]


def shares(results: list[Result]) -> list[Bar]:
    modes = (FORWARD, BACKWARD, INPLACE)
    return [
        Bar(r.mode, shape_name(r), r.contender, 100 / r.floor_x)
        for r in results
        if r.mode in modes and r.floor_x
    ]


def memories(results: list[Result]) -> list[Bar]:
    """One panel, our in-place form beside the default one."""
    names = {(INPLACE, OURS): OURS_INPLACE}
    return [
        Bar(
            BACKWARD,
            shape_name(r),
            names.get((r.mode, r.contender), r.contender),
            r.extra_mib / 1024,
        )
        for r in results
        if r.extra_mib is not None and (r.mode == BACKWARD or (r.mode, r.contender) in names)
    ]


def shape_name(r: Result) -> str:
    return f"{r.rows}×{r.vocab}\n{r.dtype}"


def draw(picture: Picture, where: str, folder: Path) -> Path:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    present = {bar.name for bar in picture.bars}
    names = [name for name in ORDER if name in present]
    panels = list(dict.fromkeys(bar.panel for bar in picture.bars))
    figure = Figure(figsize=(9, 2.5 * len(panels) + 1.1))
    for axis, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        draw_panel(axis, [bar for bar in picture.bars if bar.panel == panel], names, picture)
        axis.set_title(panel, fontsize=10, loc="left")
    handles = [drawn[0] for drawn in figure.axes[0].containers]  # one set of bars a name
    labels = [LABELS.get(name, name) for name in names]
    figure.suptitle(f"cross_entropy: {picture.title}\n{where}", fontsize=10, x=0.01, ha="left")
    figure.legend(handles, labels, ncols=len(names), loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    path = folder / picture.file
    figure.savefig(path, dpi=160)
    return path


def draw_panel(axis, bars: list[Bar], names: list[str], picture: Picture) -> None:
    """A group of bars for each shape; a contender that failed there leaves its place empty."""
    shapes = list(dict.fromkeys(bar.shape for bar in bars))
    heights = {(bar.shape, bar.name): bar.height for bar in bars}
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(shapes))]
        values = [heights.get((shape, name), 0.0) for shape in shapes]
        drawn = axis.bar(at, values, width * 0.94, color=COLORS[name])
        if name in (OURS, OURS_INPLACE):
            axis.bar_label(drawn, fmt=picture.label, fontsize=8, padding=2, bbox=PATCH)
    if picture.ceiling:
        axis.axhline(picture.ceiling, color="#333333", linewidth=0.8, linestyle="--", zorder=0)
    axis.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.margins(y=0.15)
    axis.grid(axis="y", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
