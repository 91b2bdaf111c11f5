"""The demo from the command line, on a small text, on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from msa_tiles.cli import main
from msa_tiles.demo import device, embed, kernels, picture, text
from msa_tiles.demo import run as demo

TOKENS = 2560


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def kernels_are_not_looked_at(monkeypatch):
    """`test_demo_kernels.py` generates and compares them."""
    monkeypatch.setattr(kernels, "differences", lambda *_: (0, []))


def test_demo_shows_what_it_found_and_writes_report_and_picture(tmp_path, capsys):
    assert main(["demo", "--tokens", str(TOKENS), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["agrees"] and 0 < report["error"] <= report["error_limit"]
    assert report["questions"] == len(report["outcomes"]) > 0
    found = sum(outcome["heads_with_answer"] > 0 for outcome in report["outcomes"])
    assert f"{found} of {report['questions']} questions" in shown.out
    for outcome in report["outcomes"]:
        assert outcome["phrase"] in shown.out
        hits = sum(outcome["answer_block"] in head for head in outcome["blocks"])
        assert outcome["heads_with_answer"] == hits
    assert "0 kernel files generated, equal to the shipped ones" in shown.out
    assert "selecting blocks" in shown.err and "sparse attention" in shown.err
    assert (tmp_path / "selection_map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("precision", ["fp8", "nvfp4", "fp4"])
@pytest.mark.drawn(1)
def test_fewer_bits_cost_something_and_it_is_told(tmp_path, capsys, precision):
    assert main(["demo", "--tokens", str(TOKENS), "--precision", precision, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["precision"] == precision and report["agrees"] and report["dtype"] == "bfloat16"
    cost = report["cost"]
    assert 0.8 < cost["overlap"] < 1.0 and report["error"] < cost["error"] and 0 < cost["mean_error"] < 0.5
    assert cost["found"] == sum(outcome["heads_with_answer"] > 0 for outcome in report["outcomes"])
    assert cost["found_unquantised"] > 0
    assert f"of {precision}: blocks chosen as unquantised" in shown and "on the mean" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--precision", "nvfp5"], "nvfp4"), (["--train", "--precision", "nvfp4"], "--train takes bf16")],
)
def test_precisions_that_the_demo_has_not(arguments, message, capsys):
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_text_of_the_users_own(tmp_path, capsys):
    file = tmp_path / "own.txt"
    file.write_text("\n".join(text.default_text(TOKENS)[0].splitlines()[500:1500]))
    assert main(["demo", "--text", str(file), "--tokens", str(TOKENS), "--out", str(tmp_path / "out")]) == 0
    assert str(file) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [("few words", "holds 2 tokens"), ("again and again it says " * 600, "no phrase of 8 words occurs in one place")],
)
def test_a_text_that_cannot_serve_is_refused(tmp_path, capsys, content, message):
    file = tmp_path / "own.txt"
    file.write_text(content)
    assert main(["demo", "--text", str(file), "--tokens", str(TOKENS), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow  # it takes a longer text to miss one
def test_without_matplotlib_it_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(picture, "available", lambda: False)
    assert main(["demo", "--tokens", str(TOKENS), "--out", str(tmp_path)]) == 0
    assert "matplotlib is not installed (pip install 'msa-tiles[demo]')" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_a_missed_question_is_shown_as_missed(tmp_path, capsys, monkeypatch):
    """An indexer that sees nothing takes the first blocks, and that must not be covered up."""

    def blind(ids, shape, dtype, torch_device):
        layer = embed_layer(ids, shape, dtype, torch_device)
        return embed.Layer(layer.q, layer.k, layer.v, 0 * layer.idx_q, layer.idx_k, layer.words)

    embed_layer = embed.embed
    monkeypatch.setattr(demo.embed, "embed", blind)
    assert main(["demo", "--tokens", "4096", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    missed = [outcome for outcome in report["outcomes"] if outcome["heads_with_answer"] == 0]
    assert missed
    assert capsys.readouterr().out.count("MISSED") == len(missed)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
@pytest.mark.drawn(1)
def test_an_output_that_disagrees_fails_the_demo(tmp_path, capsys, monkeypatch, factor):
    attend = demo.ops.sparse_attention
    monkeypatch.setattr(demo.ops, "sparse_attention", lambda *args, **kwargs: attend(*args, **kwargs) * factor)
    assert main(["demo", "--tokens", str(TOKENS), "--out", str(tmp_path)]) == 1
    assert "does NOT agree with dense attention" in capsys.readouterr().err


def test_selection_map_is_the_share_of_queries_and_heads():
    ids = torch.tensor([[[0, -1], [0, -1], [1, 0], [1, -1]], [[0, -1], [0, -1], [1, -1], [0, 1]]], dtype=torch.int32)
    found = picture.selection_map(ids, block_size=2, bins=2)
    assert found.tolist() == [[1.0, 0.0], [0.5, 1.0]]


def test_chunked_prefill_is_the_whole_prefill():
    shape = embed.Shape(num_q_heads=2, num_kv_heads=1, num_index_heads=1, head_dim=64, topk=4)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 50, (1500,), generator=generator).tolist()
    layer = embed.embed(ids, shape, torch.float32, torch.device("cpu"))
    results = [
        demo.prefill(layer, shape, device.Device("test", torch.device("cpu"), torch.float32, shape, chunk))[:2]
        for chunk in (0, 400)
    ]
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-4)
