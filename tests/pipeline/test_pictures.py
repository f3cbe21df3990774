"""Boxes, pictures and traces: their numbers are the timeline's, and their files are what they claim to be."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megalite.pipeline.picture import Box, Panel, boxes, chrome_trace, fill_of
from megalite.pipeline.picture_html import html_page
from megalite.pipeline.picture_svg import svg_picture
from megalite.pipeline.schedules import Action, CostModel, Kind, dualpipe_v, forward_only, one_f_one_b, zb_v
from megalite.pipeline.simulate import Timeline, simulate
from tools.draw_schedule import main

ROOT = Path(__file__).parents[2]


def panel(timeline: Timeline, title: str = "title", by_difference: bool = False) -> Panel:
    schedule = timeline.schedule
    return Panel(title, "caption", boxes(timeline), schedule.num_ranks, schedule.num_chunks, by_difference)


def test_boxes_know_time_and_memory() -> None:
    timeline = simulate(zb_v(2, 4))
    drawn = boxes(timeline)
    assert len(drawn) == 2 * 24
    for rank in range(2):
        assert max(box.memory for box in drawn if box.rank == rank) == timeline.peaks[rank]
    first_backward = next(box for box in drawn if box.label == "I0b")
    assert (first_backward.rank, first_backward.chunk, first_backward.memory) == (0, 1, 4)
    assert (first_backward.start, first_backward.end) == (4, 5)
    assert {box.memory for box in boxes(simulate(forward_only(2, 3)))} == {1}


def test_overlapped_pairs_share_the_lane() -> None:
    drawn = boxes(simulate(dualpipe_v(2, 4), CostModel(overlapped_pair=2.5)))
    upper = [box for box in drawn if (box.top, box.height) == (0, 0.5)]
    lower = [box for box in drawn if (box.top, box.height) == (0.5, 0.5)]
    assert {box.action for box in upper} == dualpipe_v(2, 4).overlapped
    assert [(box.start, box.end) for box in upper] == [(box.start, box.end) for box in lower]
    assert all(box.height == 1 for box in boxes(simulate(dualpipe_v(2, 4))))


def test_colours() -> None:
    def box(chunk: int, difference: float) -> Box:
        return Box(Action(Kind.FORWARD, 0, 0), 0, chunk, "F0", 0, 2, 1, difference=difference)

    plain = Panel("", "", [box(0, 0), box(1, 0)], 1, 2)
    assert fill_of(plain, box(0, 0)) == "#5b8dc9"
    assert fill_of(plain, box(1, 0)) > fill_of(plain, box(0, 0))  # lighter
    compared = Panel("", "", [box(0, 0)], 1, 1, by_difference=True)
    assert [fill_of(compared, box(0, d)) for d in (0, 1, 5, -1)] == ["#ffffff", "#c83c32", "#c83c32", "#3c64be"]


def test_svg_is_small_and_well_formed() -> None:
    timelines = [simulate(one_f_one_b(4, 8)), simulate(zb_v(4, 8), CostModel(0.5, 0.5, 0.5))]
    text = svg_picture([panel(timelines[0], "a < b"), panel(timelines[1])])
    root = ElementTree.fromstring(text)
    filled = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("fill", "#fff") != "#fff"]
    assert len(filled) == 4 * 16 + 4 * 48 + 4  # actions and the legend
    assert max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in filled) == pytest.approx(1000, abs=0.2)
    assert len(text) < 40_000


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path: Path) -> None:
    command = "--schedule 1f1b zb-v --pp 4 --num-microbatches 8 --output "
    assert command + "docs/schedules.svg" in (ROOT / "README.md").read_text()
    assert main([*command.split(), str(tmp_path / "drawn.svg")]) == 0
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "docs" / "schedules.svg").read_text()
    assert "zb-v: span 24, bubble 0.0% of it, at most 4 micro-batches" in (tmp_path / "drawn.svg").read_text()


def test_html_is_self_contained() -> None:
    page = html_page("<title>", [panel(simulate(one_f_one_b(2, 3)), "</script>")])
    assert "&lt;title&gt;" in page
    assert page.count("</script>") == 1  # the data cannot end the script
    assert "src=" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    data = json.loads(page.split("const panels = ")[1].split(", lane = ")[0])
    assert data[0]["boxes"][0] == [0, 0.0, 1.0, "F0", "#5b8dc9", 0.0, 1.0, 1, "forward of micro-batch 0, stage 0", None]
    assert len(data[0]["boxes"]) == 12


def test_chrome_trace() -> None:
    timeline = simulate(one_f_one_b(2, 3), CostModel(latency=0.5))
    events = json.loads(chrome_trace({"one": timeline, "two": timeline}, 1000))["traceEvents"]
    run = [event for event in events if event["ph"] == "X"]
    assert len(run) == 2 * 12
    first = next(event for event in run if (event["pid"], event["tid"], event["name"]) == (1, 1, "B0"))
    assert (first["ts"], first["dur"]) == (2500, 2000)
    assert first["args"] == {"stage": 1, "microbatch": 0, "activations": 1}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"one", "two"}


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_tool_writes_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "--schedule zb-h1 --pp 3 --num-microbatches 4 --json".split()
    for name, start in (("a.svg", b"<svg"), ("a.html", b"<!doctype html>"), ("deep/a.png", b"\x89PNG"), ("a.pdf", b"%PDF")):
        assert main([*numbers, "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert last_line(capsys)["makespan"] == 3 * 4 + 2
    assert main([*numbers, "--output", str(tmp_path / "a.txt")]) == 2
    assert "end it in .svg, .png, .pdf, .html" in capsys.readouterr().err


def test_tool_compares_schedules_of_equal_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "orders.csv"
    assert main(f"--schedule zb-v 1f1b --pp 2 --num-microbatches 4 --json --csv {table}".split()) == 0
    figures = last_line(capsys)
    assert (figures["schedule"], figures["span"], figures["others"][0]["span"]) == ("zb-v", 12, 15)
    assert main(f"--schedule {table} --pp 2 --num-microbatches 4 --json".split()) == 0
    assert last_line(capsys)["span"] == 24
    assert main("--schedule 1f1b zb-v --cost 1:1,1,1,0".split()) == 2
    assert "not a list" in capsys.readouterr().err


def test_tool_takes_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--schedule 1f1b --cost 1:2,1:2,1,0 --json".split()) == 0
    assert last_line(capsys)["makespan"] == 23  # see test_costs_per_stage
    assert main("--schedule dualpipe-v --overlapped-pair 3 --json".split()) == 0
    assert last_line(capsys)["makespan"] == 26
    assert main("--schedule forward-only --num-microbatches 3 --no-overlap-communication --cost 1,1,1,0.5 --json".split()) == 0
    assert last_line(capsys)["makespan"] == 5.5
    assert main("--schedule forward-only --num-microbatches 2 --message-bytes 6 --bandwidth 2 --cost 1,1,1,0.5 --json".split()) == 0
    assert last_line(capsys)["makespan"] == 8.5
