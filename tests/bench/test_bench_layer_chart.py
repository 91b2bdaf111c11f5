"""The chart of a layer's time in vLLM, of invented rows."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest
from invented import row

from msa_tiles.bench import canvas, layer_chart, rows
from msa_tiles.bench.layer_chart import DECODE, PREFILL
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.cli import main

pytest.importorskip("matplotlib")
NOW = rows.digests()
K = 1024
LENGTHS = {1: [8, 32, 128, 512, 1024], 8: [8, 32, 128, 512, 1024], 32: [8, 32, 128, 512]}


@pytest.fixture
def results():
    """Rows of every case of both, vLLM at five times the floor and ours at two."""
    return [row(op, label) for op in (PREFILL, DECODE) for label in BENCHMARKS[op].labels]


@pytest.fixture
def drawn(tmp_path):
    def draw(results):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(result) + "\n" for result in results))
        status = main(["bench", "--from", str(file), "--charts", str(tmp_path / "charts")])
        return status, {path.name: path for path in (tmp_path / "charts").glob("layer_time*")}

    return draw


def test_recorded_rows_become_the_chart(results, drawn):
    status, found = drawn(results)
    assert status == 0 and set(found) == {"layer_time.png", "layer_time.svg"}
    assert found["layer_time.png"].read_bytes().startswith(b"\x89PNG\r\n")
    first = found["layer_time.svg"].read_bytes()
    assert xml.etree.ElementTree.fromstring(first).tag.endswith("svg")
    _, again = drawn([result | {"ms": 2 * result["ms"]} for result in results])
    assert again["layer_time.svg"].read_bytes() != first, "it shows our time"


def test_rows_without_vllm_or_of_one_length_are_no_line(results, drawn):
    assert drawn([result | {"baselines": {"by_name": 1.0}} for result in results])[1] == {}
    assert drawn([result for result in results if result["case"] in ("prefill_32k_u", "decode_8k_b8")])[1] == {}


def test_lines_are_by_requests_in_order_of_context(results):
    found = layer_chart.lines(results, DECODE, "bf16", NOW)
    assert {key: [point.context // K for point in points] for key, points in found.items()} == LENGTHS
    prefill = layer_chart.lines(results, PREFILL, "bf16", NOW)
    assert [point.context // K for point in prefill[1]] == [4, 8, 16, 32, 64, 128], "whole prompts alone"
    for points in (*found.values(), *prefill.values()):
        for point in points:
            assert (point.ours, point.theirs) == (point.row["ms"], point.row["baselines"]["vllm"])
            assert point.ratio == pytest.approx(2.5)


def test_a_later_run_without_vllm_hides_no_point(results):
    before = {op: layer_chart.lines(results, op, "bf16", NOW) for op in (PREFILL, DECODE)}
    later = [result | {"ms": result["ms"] / 2, "baselines": {"by_name": 1.0}} for result in results]
    assert before == {op: layer_chart.lines([*results, *later], op, "bf16", NOW) for op in before}
    with_it = [result | {"ms": result["ms"] / 2} for result in results]
    for op, lines in before.items():
        after = layer_chart.lines([*results, *with_it], op, "bf16", NOW)
        assert [p.ratio for ps in after.values() for p in ps] == [2 * p.ratio for ps in lines.values() for p in ps]


def test_each_precision_has_a_chart_of_its_own(results, drawn):
    _, found = drawn([*results, *(row(DECODE, label, precision="q8k8+q16kv8") for label in BENCHMARKS[DECODE].labels)])
    assert {"layer_time.svg", "layer_time_fp8.svg"} <= set(found)


def test_the_chart_tells_units_requests_and_ratios(results, drawn, monkeypatch):
    from matplotlib.text import Text

    texts: list[str] = []
    monkeypatch.setattr(canvas, "save", lambda made, stem: texts.extend(t.get_text() for t in made.findobj(Text)) or [])
    drawn([result for result in results if result["op"] == DECODE])
    assert {"microseconds", "1 request", "8 requests", "32 requests", "not timed", "8K", "1M"} <= set(texts)
    assert texts.count("2.5x") == sum(map(len, LENGTHS.values()))
    assert {"vLLM's Triton operators", "msa_tiles"} <= set(texts) and "64 requests" not in texts
    assert any("BF16" in text and row(DECODE, "decode_8k_b1")["card"] in text for text in texts)
