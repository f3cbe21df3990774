"""A picture of timelines as a small SVG text: one rectangle and one number per action, nothing else.

Plotting libraries spend a kilobyte on each labelled box; a README picture of a few hundred boxes should stay below 40.
Several timelines are drawn below each other on one time scale. Lengths are in SVG units (pixels at scale 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from megalite.pipeline.picture import COLOURS, FASTER, KIND_NAMES, SLOWER, Panel, fill_of, hex_colour

__all__ = ["svg_picture"]

WIDTH, LEFT, LANE, TITLE, TOP = 1000, 50, 24, 26, 22
_DIGIT = 6.2  # width of a digit in the font of the labels

_STYLE = (
    "text{font:12px sans-serif;fill:#222}.n{font-size:10px;text-anchor:middle}.t{font-size:10px;text-anchor:middle;fill:#555}"
    "rect{stroke:#fff;stroke-width:.6}.l{fill:#f2f2f2;stroke:none}.d{stroke:#999}"
)


def svg_picture(panels: Sequence[Panel], unit: str = "") -> str:
    """The text of the file. unit: printed behind the numbers of the time axis."""
    end = max(box.end for panel in panels for box in panel.boxes)
    parts = list(_legend(panels))
    top = TOP
    for panel in panels:
        parts += _panel(panel, top, end)
        top += TITLE + LANE * panel.num_ranks
    parts += _axis(top, end, unit)
    size = f'width="{WIDTH + 10}" height="{top + 24}" viewBox="0 0 {WIDTH + 10} {top + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _panel(panel: Panel, top: float, end: float) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top + TITLE - 8}">{escape(panel.title)}: {escape(panel.caption)}</text>'
    top += TITLE
    for rank in range(panel.num_ranks):
        y = top + LANE * rank
        yield f'<text x="2" y="{y + 16}">rank {rank}</text>'
        yield f'<rect class="l" x="{LEFT}" y="{y + 1}" width="{WIDTH - LEFT}" height="{LANE - 2}"/>'
    scale = (WIDTH - LEFT) / end if end else 0.0
    outlined = ' class="d"' if panel.by_difference else ""
    for box in panel.boxes:
        x, width = LEFT + box.start * scale, (box.end - box.start) * scale
        height = (LANE - 2) * box.height
        y = top + LANE * box.rank + 1 + (LANE - 2) * box.top
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        text = str(box.action.microbatch)
        label = ""
        if width > 2 + _DIGIT * len(text):
            label = f'<text class="n" x="{_number(x + width / 2)}" y="{_number(y + height / 2 + 3.5)}">{text}</text>'
        yield f'<rect{outlined} {place} fill="{fill_of(panel, box)}"/>{label}'


def _axis(top: float, end: float, unit: str) -> Iterator[str]:
    if not end:
        return
    step = 10 ** math.floor(math.log10(end / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 10)
    yield f'<path d="M{LEFT} {top + 3}H{WIDTH}" stroke="#555" fill="none"/>'
    for number in range(math.floor(end / step) + 1):
        x = _number(LEFT + number * step / end * (WIDTH - LEFT))
        yield f'<path d="M{x} {top + 3}v4" stroke="#555"/><text class="t" x="{x}" y="{top + 18}">{number * step:.6g}{escape(unit)}</text>'


def _legend(panels: Sequence[Panel]) -> Iterator[str]:
    kinds = {box.action.kind for panel in panels for box in panel.boxes}
    entries = [(hex_colour(COLOURS[kind]), KIND_NAMES[kind]) for kind in COLOURS if kind in kinds]
    if any(panel.by_difference for panel in panels):
        entries += [(hex_colour(SLOWER), "slower than predicted"), (hex_colour(FASTER), "faster")]
    x = LEFT
    for fill, text in entries:
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{fill}"/><text x="{x + 17}" y="18">{text}</text>'
        x += 32 + 7 * len(text)
