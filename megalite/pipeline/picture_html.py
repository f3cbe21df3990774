"""A schedule as one self-contained HTML page: a lane per rank, and the details of an action under the pointer.

The page holds its data as JSON and draws with a few lines of script of its own; it loads nothing. Several timelines are
drawn below each other on the same time scale.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from megalite.pipeline.picture import COLOURS, FASTER, KIND_NAMES, SLOWER, Panel, fill_of

__all__ = ["html_page"]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
body { font: 14px system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }
h2 { font-size: 1.05em; margin: 1.2em 0 .2em } p { margin: .2em 0 .5em; color: #555 }
svg { display: block; width: 100% } text { font-size: 11px; pointer-events: none } rect { stroke: #fff; stroke-width: .7 }
rect.lane { fill: #f2f2f2; stroke: none } rect.diff { stroke: #999 } rect.box:hover { stroke: #000; stroke-width: 1.5 }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: .4em .6em; border-radius: 4px }
#tip { white-space: pre; font-size: 12px }
.key { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; vertical-align: -1px }
</style></head><body><div>LEGEND</div><div id="panels"></div><div id="tip"></div><script>
const panels = DATA, lane = 26, left = 56, width = 1200, unit = "UNIT";
const ns = "http://www.w3.org/2000/svg", tip = document.getElementById("tip");
const end = Math.max(...panels.flatMap(p => p.boxes.map(b => b[2])));
const x = t => left + t / end * (width - left), num = t => Number(t.toPrecision(6)) + unit;
function add(parent, name, attributes, text) {
  const made = parent.appendChild(document.createElementNS(ns, name));
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}
for (const panel of panels) {
  const place = document.getElementById("panels");
  place.appendChild(document.createElement("h2")).textContent = panel.title;
  const svg = add(place, "svg", {viewBox: `0 0 ${width} ${panel.ranks * lane + 4}`});
  for (let rank = 0; rank < panel.ranks; rank++) {
    add(svg, "rect", {class: "lane", x: left, y: rank * lane + 2, width: width - left, height: lane - 4});
    add(svg, "text", {x: 0, y: rank * lane + 17}, "rank " + rank);
  }
  for (const [rank, start, stop, label, fill, top, height, memory, name, difference] of panel.boxes) {
    const h = (lane - 4) * height, y = rank * lane + 2 + (lane - 4) * top, w = x(stop) - x(start);
    const rect = add(svg, "rect", {class: panel.diff ? "box diff" : "box", x: x(start), y, width: Math.max(w, .5), height: h, fill});
    if (w > 7 * label.length) add(svg, "text", {x: x(start) + w / 2, y: y + h / 2 + 4, "text-anchor": "middle"}, label);
    rect.onmousemove = event => {
      tip.style.display = "block";
      const below = event.clientY + 110 < innerHeight, inside = event.clientX + 220 < innerWidth;
      tip.style.left = (inside ? event.clientX + 14 : event.clientX - 220) + "px";
      tip.style.top = (below ? event.clientY + 14 : event.clientY - 110) + "px";
      tip.textContent = `${label}: ${name}\\nstart ${num(start)}, end ${num(stop)}\\ntakes ${num(stop - start)}`
        + (difference === null ? "" : ` (predicted ${num(stop - start - difference)})`) + `\\nactivations on rank ${rank}: ${memory}`;
    };
    rect.onmouseleave = () => { tip.style.display = "none"; };
  }
  place.appendChild(document.createElement("p")).textContent = panel.caption;
}
</script></body></html>
"""


def html_page(title: str, panels: Sequence[Panel], unit: str = "") -> str:
    """The text of the page. unit: printed behind times."""
    data = [_panel_data(panel) for panel in panels]
    kinds = {box.action.kind for panel in panels for box in panel.boxes}
    legend = "".join(
        f'<span class="key" style="background: rgb{COLOURS[kind]}"></span>{KIND_NAMES[kind]}' for kind in COLOURS if kind in kinds
    )
    if any(panel.by_difference for panel in panels):
        legend += f'<span class="key" style="background: rgb{SLOWER}"></span>slower than predicted'
        legend += f'<span class="key" style="background: rgb{FASTER}"></span>faster'
    # `</` inside a string would end the script element
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    parts = {"TITLE": html.escape(title), "LEGEND": legend, "UNIT": html.escape(unit), "DATA": text}
    page = _PAGE
    for name, part in parts.items():
        page = page.replace(name, part, 1)
    return page


def _panel_data(panel: Panel) -> dict[str, object]:
    names = {"title": panel.title, "caption": panel.caption, "ranks": panel.num_ranks, "diff": panel.by_difference}
    return {**names, "boxes": _rows(panel)}


def _rows(panel: Panel) -> list[list[object]]:
    """The columns that the script unpacks."""
    return [
        [
            box.rank,
            round(box.start, 9),
            round(box.end, 9),
            box.label,
            fill_of(panel, box),
            box.top,
            box.height,
            box.memory,
            f"{KIND_NAMES[box.action.kind]} of micro-batch {box.action.microbatch}, stage {box.action.stage}",
            None if box.difference is None else round(box.difference, 9),
        ]
        for box in panel.boxes
    ]
