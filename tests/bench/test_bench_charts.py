"""Charts of invented rows: what they show, and that the same rows give the same bytes."""

from __future__ import annotations

import xml.etree.ElementTree

import pytest
from invented import DAY, H100, everything, row

from msa_tiles.bench import canvas, cases, charts, labels, precisions, rows
from msa_tiles.bench.charts import LAST, WHOLE
from msa_tiles.bench.operators import BENCHMARKS

pytest.importorskip("matplotlib")
NOW = rows.digests()
K = 1024


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("charts")
    return charts.draw(everything(), folder)


def test_each_chart_is_a_png_and_an_svg(drawn):
    speed_ups = ("speed_up", "layer_time", "speed_up_fp8", "layer_time_fp8", "speed_up_nvfp4", "speed_up_fp4")
    names = (*speed_ups, "roofline", "roofline_4bit")
    assert [path.name for path in drawn] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    for path in drawn:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n")
        else:
            assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.slow  # it draws all charts once more
def test_other_rows_give_other_bytes(drawn, tmp_path):
    slower = charts.draw([result | {"ms": result["ms"] * 2} for result in everything()], tmp_path)
    assert all(one.read_bytes() != other.read_bytes() for one, other in zip(slower, drawn, strict=True))


@pytest.mark.slow  # likewise
def test_the_same_rows_give_the_same_bytes_whatever_the_settings_of_matplotlib(drawn, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "axes.facecolor": "red"}):
        again = charts.draw(everything(), tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in drawn]


def test_speed_ups_are_of_the_faster_dsl_in_order_of_context():
    results = everything()
    lines = charts.speed_ups(results, "prefill", "bf16", NOW)
    assert set(lines) == {(kind, peer) for kind in (WHOLE, LAST) for peer in ("dense", "vllm")}
    whole = lines[WHOLE, "dense"]
    assert [point.context for point in whole] == [4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K]
    assert [point.context for point in lines[LAST, "vllm"]] == [8 * K, 32 * K, 128 * K, 512 * K, 1024 * K]
    assert all(point.ratio == pytest.approx(30 / 1.6) and point.peer == "fa4" for point in whole)
    decode = charts.speed_ups(results, "msa_decode", "bf16", NOW)
    assert [point.context for point in decode["", "dense"]] == [8 * K, 32 * K, 128 * K, 512 * K, 1024 * K]
    assert {point.peer for point in decode["", "dense"]} == {"dense_bytes"}


def test_the_fastest_dense_attention_is_the_peer():
    one = row("msa_decode", "decode_8k_b8", ms=1.0, baselines={"fa4": 3.0, "dense_bytes": 4.0})
    [point] = charts.speed_ups([one], "msa_decode", "bf16", NOW)["", "dense"]
    assert (point.ratio, point.peer) == (3.0, "fa4")


def test_a_peer_is_that_of_the_newest_run_with_it_and_its_ratio_of_that_run():
    """What a later run leaves out, a peer or one of our DSLs, hides nothing; figures of two runs are never divided."""

    def both(ms, baselines, *dsls):
        return [
            row("msa_decode", "decode_8k_b8", dsl, ms=time, baselines=baselines)
            for dsl, time in zip(dsls, ms, strict=True)
        ]

    results = [
        *both((2.0, 1.0), {"vllm": 4.0, "fa4": 3.0, "dense_bytes": 9.0}, "tilelang", "cutedsl"),
        *both((1.5, 0.9), {"vllm": 4.5, "fa4": 2.7}, "tilelang", "cutedsl"),
        *both((0.5,), {"dense_bytes": 6.0}, "cutedsl"),
        *both((0.4,), {}, "cutedsl"),
    ]

    def shown(results):
        lines = charts.speed_ups(results, "msa_decode", "bf16", NOW)
        return {name: (p.peer, round(p.ratio, 6), p.row["ms"]) for (_, name), [p] in lines.items()}

    first = {"dense": ("fa4", 3.0, 1.0), "vllm": ("vllm", 4.0, 1.0)}
    second = {"dense": ("fa4", 3.0, 0.9), "vllm": ("vllm", 5.0, 0.9)}
    assert [shown(results[:number]) for number in (2, 4, 5, 6)] == [first, second, second, second]
    quicker = both((0.5,), {"dense_bytes": 2.0}, "cutedsl")
    assert shown([*results, *quicker]) == second | {"dense": ("dense_bytes", 4.0, 0.5)}


def test_points_of_the_roofline_are_work_by_time():
    latest = rows.latest(everything())
    points = {(p.op, p.row["dsl"], p.row["precision"]): p for p in charts.roofline_points(latest, ("bf16", "fp8"))}
    point = points["select_blocks", "tilelang", "bf16"]
    keys = 131072 * 131073 / 2
    flops, moved = 2 * 4 * 128 * keys, 2 * 131072 * 5 * 128 + 4 * 4 * 131072 * 16
    assert point.row["case"] == "prefill_128k_u"
    assert point.intensity == pytest.approx(flops / moved)
    assert point.tflops == pytest.approx(989.4 / 2, rel=1e-6)
    assert point.share(cases.device_of(H100)) == pytest.approx(0.5)
    assert points["select_blocks", "cutedsl", "q8k8"].tflops == pytest.approx(1978.9 / 1.6, rel=1e-6)
    ops = {op for op, _, _ in points}
    assert "build_schedule" not in ops, "it multiplies nothing"
    assert not ops & {"prefill", "msa_decode"}, "several kernels have several rooflines"
    assert {"combine", "topk_select", "decode_score", "decode_topk", "sparse_decode", "sparse_attention"} <= ops


@pytest.fixture
def written(monkeypatch):
    """Every text of the figures, in place of files."""
    texts: list[str] = []

    def collect(figure, stem):
        from matplotlib.text import Text

        texts.extend(text.get_text() for text in figure.findobj(Text))
        return []

    monkeypatch.setattr(canvas, "save", collect)
    return texts


def test_card_day_axes_and_peers_are_named(written, tmp_path):
    charts.draw(everything(), tmp_path)
    whole = "\n".join(written)
    for words in (H100, DAY, "context length, tokens", "achieved TFLOPS", "operations per byte", "FlashAttention-4"):
        assert words in whole
    assert "BF16, 989 TFLOPS" in written and "memory, 3.35 TB/s" in written
    assert "select_blocks  62%" in written and "select_blocks FP8  62%" in written
    assert "have changed since" not in whole


def test_stale_figures_are_told(written, tmp_path):
    results = everything()
    for result in results:
        if (result["op"], result["case"]) == ("msa_decode", "decode_1m_b1"):
            result["digest"] = "old"
    charts.draw(results, tmp_path)
    assert not any("have changed since" in text for text in written), "no chart shows that case"
    for result in results:
        if (result["op"], result["case"]) == ("msa_decode", "decode_1m_b8"):
            result["digest"] = "old"
    charts.draw(results, tmp_path)
    groups = {precisions.group(name) for name in BENCHMARKS["msa_decode"].precisions}
    assert sum("some kernels have changed since" in text for text in written) == len(groups) == 4


def test_names_do_not_cover_each_other(written, monkeypatch, tmp_path):
    """The names of the operators and the ratios at the ends of lines."""
    boxes = []
    place = labels.place

    def placed(figure, axis, words, at, taken, **style):
        before = list(taken)
        place(figure, axis, words, at, taken, **style)
        boxes.append((words, taken[-1], before))

    monkeypatch.setattr(labels, "place", placed)
    charts.draw(everything(), tmp_path)
    assert len(boxes) > 12
    assert [words for words, box, before in boxes if any(box.overlaps(other) for other in before)] == []


@pytest.fixture
def saved(monkeypatch):
    """The names of the figures, which are not written."""
    names: list[str] = []

    def note(figure, stem):
        names.append(stem.name)
        return []

    monkeypatch.setattr(canvas, "save", note)
    return names


def test_cards_have_charts_of_their_own(saved, tmp_path):
    some = [result for result in everything() if result["precision"] == "bf16"]
    charts.draw([*some, *(result | {"card": "NVIDIA H200"} for result in some)], tmp_path)
    assert {"speed_up_nvidia-h200", "speed_up_nvidia-h100-80gb-hbm3", "roofline_nvidia-h200"} <= set(saved)


def test_an_unknown_card_has_no_roofline(saved, tmp_path):
    charts.draw([result | {"card": "NVIDIA GeForce RTX 4090"} for result in everything()], tmp_path)
    assert saved and not [name for name in saved if "roofline" in name]


def test_one_length_is_no_line(tmp_path):
    assert charts.draw([row("prefill", "prefill_32k_u")], tmp_path) == []
