"""Draws the figures of docs/concepts.md: python docs/figures/draw.py

The colours are CSS variables. A browser that shows the file alone takes the light or dark colours
of the system. On the site, site.css sets the variables to the colours of the page.
"""

from pathlib import Path

STYLE = """
.figure { --paper: #ffffff; --ink: #24292f; --faint: #8c959f; --one: #b6d4fe; --two: #ffd8a8; \
--both: #b2e2c0; font-family: system-ui, sans-serif; font-size: 13px; }
@media (prefers-color-scheme: dark) { .figure { --paper: #0d1117; --ink: #e6edf3; \
--faint: #7d8590; --one: #1f4b8f; --two: #8a5a14; --both: #1f6b3a; } }
.figure .paper { fill: var(--paper); }
.figure text { fill: var(--ink); }
.figure .note { fill: var(--faint); font-size: 12px; }
.figure .code { font-family: ui-monospace, monospace; font-size: 12px; }
.figure .one { fill: var(--one); } .figure .two { fill: var(--two); }
.figure .both { fill: var(--both); } .figure .none { fill: none; }
.figure .box { stroke: var(--ink); stroke-width: 1; }
.figure .dashed { fill: none; stroke: var(--faint); stroke-dasharray: 4 3; }
.figure .line { fill: none; stroke: var(--ink); stroke-width: 1.2; }
.figure .tip { fill: var(--ink); }
"""


def rect(x: float, y: float, w: float, h: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="3"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    words = words.replace("  ", "\N{NO-BREAK SPACE} ")  # SVG joins several blanks
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a tip. The line is vertical, or ends vertically."""
    side = 4 if to_y > y else -4
    tip = f"M {to_x - 4} {to_y - 1.5 * side} L {to_x + 4} {to_y - 1.5 * side} L {to_x} {to_y} z"
    middle = (y + to_y) / 2
    bend = f"M {x} {y} C {x} {middle} {to_x} {middle} {to_x} {to_y - side}"
    return f'<path class="line" d="{bend}"/><path class="tip" d="{tip}"/>'


def merge() -> tuple[int, list[str]]:
    heights = [18, 30, 12, 46, 24, 36, 15, 27, 20, 60, 33, 14]
    parts = [text(200, 22, "the logits z of one row")]
    for i, height in enumerate(heights):
        kind = "one" if i < 5 else "two"
        parts.append(rect(30 + i * 28.8, 96 - height, 22, height, f"{kind} box"))
    parts += [
        arrow(98, 104, 98, 130), arrow(270, 104, 270, 130),
        rect(20, 132, 156, 66, "one box"), rect(192, 132, 188, 66, "two box"),
        text(98, 152, "the first part"), text(286, 152, "the second part"),
        text(98, 171, "m₀  s₀  w₀", "code"), text(286, 171, "m₁  s₁  w₁", "code"),
        text(98, 189, "t₀  c₀", "code"), text(286, 189, "t₁  c₁", "code"),
        arrow(98, 198, 170, 232), arrow(286, 198, 230, 232),
        rect(40, 234, 320, 116, "both box"),
        text(200, 254, "the merge"),
        text(200, 276, "m = max(m₀, m₁)     dᵢ = mᵢ - m", "code"),
        text(200, 296, "s = s₀ exp(d₀) + s₁ exp(d₁)", "code"),
        text(200, 316, "w = Σ (wᵢ + dᵢ sᵢ) exp(dᵢ)", "code"),
        text(200, 336, "t = t₀ + t₁     c = c₀ + c₁", "code"),
        arrow(200, 350, 200, 376),
        text(200, 394, "logsumexp, log p, entropy of the whole row"),
    ]  # fmt: skip
    return 406, parts


def head() -> tuple[int, list[str]]:
    parts = [
        text(200, 22, "many rows fit into the workspace: chunks of rows"),
        text(200, 262, "few rows fit into the workspace: blocks of columns"),
    ]
    for top, by_rows in ((74, True), (314, False)):
        parts += [
            text(36, top - 12, "hidden"), rect(14, top, 44, 120, "none box"),
            text(220, top - 26, "weightᵀ"), rect(98, top - 20, 244, 12, "none box"),
            text(78, top + 64, "×"), rect(98, top, 244, 120, "dashed"),
        ]  # fmt: skip
        for i in range(1, 4):
            cut = f"M 98 {top + 30 * i} h 244" if by_rows else f"M {98 + 61 * i} {top} v 120"
            parts.append(f'<path class="dashed" d="{cut}"/>')
        if by_rows:
            parts += [
                rect(14, top + 30, 44, 30, "one box"), rect(98, top - 20, 244, 12, "one box"),
                rect(98, top + 30, 244, 30, "two box"), text(220, top + 49, "now in memory"),
                text(220, top + 19, "done", "note"), text(220, top + 79, "next", "note"),
            ]  # fmt: skip
        else:
            parts += [
                rect(14, top, 44, 120, "one box"), rect(159, top - 20, 61, 12, "one box"),
                rect(159, top, 61, 120, "two box"),
                text(189.5, top + 48, "now"), text(189.5, top + 65, "in"),
                text(189.5, top + 82, "memory"),
                text(128, top + 64, "done", "note"), text(250, top + 64, "next", "note"),
            ]  # fmt: skip
        parts.append(text(220, top + 140, "all logits: N rows × V columns", "note"))
    return 466, parts


def lazy() -> tuple[int, list[str]]:
    parts = [
        rect(20, 16, 150, 40, "one box"), text(95, 41, "body of the model"),
        rect(230, 16, 150, 40, "two box"), text(305, 41, "weight of the head"),
        arrow(95, 56, 150, 92), arrow(305, 56, 250, 92),
        rect(70, 94, 260, 74, "both box"),
        text(200, 115, "lazy logits"),
        text(200, 135, "shape, dtype, autograd history", "code"),
        text(200, 154, "hidden states + weight, no values", "code"),
        arrow(140, 168, 100, 206), arrow(260, 168, 300, 206),
        rect(14, 208, 178, 92, "none box"), rect(208, 208, 178, 92, "none box"),
        text(103, 230, "cross_entropy, topk,"), text(103, 248, "log_softmax + gather"),
        text(103, 270, "computed in parts", "note"), text(103, 288, "memory: workspace", "note"),
        text(297, 230, "numpy(), cumsum,"), text(297, 248, "kernels of others"),
        text(297, 270, "logits are materialised", "note"),
        text(297, 288, "memory: all logits", "note"),
        arrow(103, 300, 103, 326), arrow(297, 300, 297, 326),
        text(103, 344, "the same loss"), text(297, 344, "the same values,"),
        text(103, 362, "and gradients", ""), text(297, 362, "and a warning"),
    ]  # fmt: skip
    return 376, parts


def main() -> None:
    for draw in (merge, head, lazy):
        height, parts = draw()
        svg = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 400 {height}">',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="400" height="{height}" rx="6"/>',
            *parts,
            "</svg>",
        ]
        Path(__file__).with_name(f"{draw.__name__}.svg").write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
