"""Rows as a table."""

from __future__ import annotations

import pytest
from invented import everything, row

from msa_tiles import console
from msa_tiles.bench import rows, table

NOW = rows.digests()
COLUMNS = 140


def line(*results) -> dict[str, str]:
    """The one line of these rows, by heading."""
    heading, only = table.lines(results, NOW)
    return dict(zip(heading, only, strict=True))


def test_both_dsls_the_best_peer_and_the_floor_of_the_faster_one():
    changes = {"baselines": {"vllm": 16.2, "fa4": 27.0, "cudnn": 30.0}}
    shown = line(
        row("sparse_attention", "prefill_32k_u", ms=8.1, **changes),
        row("sparse_attention", "prefill_32k_u", "cutedsl", ms=5.4, **changes),
    )
    assert shown == {
        "op": "sparse_attention",
        "case": "prefill_32k_u",
        "prec": "bf16",
        "tilelang": "8.1000",
        "cutedsl": "5.4000",
        "best peer": "16.20 vllm",
        "ratio": "3.00x",
        "floor": "2.1575",
        "share": "40%",
        "gate": "2.5x goal met (3.00)",
    }


def test_what_was_not_measured_is_not_filled_in():
    shown = line(row("combine", "prefill_4k", "cutedsl", baselines={}, floor_ms=None))
    assert [shown[name] for name in ("tilelang", "best peer", "ratio", "floor", "share", "gate")] == [
        "-", "-", "-", "-", "-", "",
    ]  # fmt: skip


def test_the_ratio_is_of_one_run():
    """The faster row's own peers, however fast they were beside the other."""
    shown = line(
        row("combine", "prefill_4k", ms=2.0, baselines={"torch": 3.0}),
        row("combine", "prefill_4k", "cutedsl", ms=1.0, baselines={"torch": 5.0}),
    )
    assert (shown["best peer"], shown["ratio"]) == ("5.0000 torch", "5.00x")


def test_a_peer_that_the_last_run_left_out_is_that_of_an_earlier_one():
    """Where ours took about as long then, and with the figures of that run; also beside the other DSL."""
    earlier = row("combine", "prefill_4k", "cutedsl", ms=1.05, baselines={"torch": 5.25, "flashinfer": 0.84})
    slow = row("combine", "prefill_4k", "cutedsl", ms=1.2, baselines={"vllm": 0.1})
    last = row("combine", "prefill_4k", "cutedsl", ms=1.0, baselines={"torch": 4.0})
    shown = line(slow, earlier, last)
    assert (shown["cutedsl"], shown["best peer"], shown["ratio"]) == ("1.0000", "0.8400 flashinfer", "0.80x")
    shown = line(slow, earlier, last | {"dsl": "tilelang"})
    assert (shown["tilelang"], shown["best peer"], shown["ratio"]) == ("1.0000", "0.8400 flashinfer", "0.80x")
    shown = line(slow, last)
    assert (shown["best peer"], shown["ratio"]) == ("4.0000 torch", "4.00x")


def test_the_latest_row_of_a_case_counts():
    assert line(row("combine", "prefill_4k", ms=1.0), row("combine", "prefill_4k", ms=3.0))["tilelang"] == "3.0000"


def test_stale_figures_are_marked_and_never_stand_for_the_kernel():
    old, new = row("combine", "prefill_4k", ms=1.0, digest="old"), row("combine", "prefill_4k", "cutedsl", ms=2.0)
    shown = line(old, new | {"baselines": {"torch": 8.0}})
    assert (shown["tilelang"], shown["cutedsl"], shown["ratio"]) == ("1.0000*", "2.0000", "4.00x")
    assert table.STALE_LEGEND in table.legend(table.lines([old, new], NOW))
    assert table.STALE_LEGEND not in table.legend(table.lines([new], NOW))
    gated = line(row("topk_select", "prefill_128k_u", digest="old", ms=1.0, baselines={"flashinfer": 1.7}))
    assert gated["gate"] == "1.2x stale (1.70)"


def test_lines_come_in_the_order_of_the_operators_and_unknown_ones_last():
    results = [row("combine", "prefill_4k"), row("index_score", "chunk8k_1m_u"), row("index_score", "prefill_8k_u")]
    results.append(row("combine", "prefill_4k") | {"op": "msa_attention", "case": "train_32k"})
    assert [shown[:2] for shown in table.lines(results, NOW)[1:]] == [
        ("index_score", "prefill_8k_u"),
        ("index_score", "chunk8k_1m_u"),
        ("combine", "prefill_4k"),
        ("msa_attention", "train_32k"),
    ]


@pytest.mark.parametrize("digest", [None, "stale"])
def test_everything_fits_the_width(capsys, digest):
    results = [result | ({"digest": digest} if digest else {}) for result in everything()]
    lines = table.lines(results, NOW)
    console.table(lines)
    console.say(table.legend(lines))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) > 80
    assert max(map(len, shown)) <= COLUMNS
