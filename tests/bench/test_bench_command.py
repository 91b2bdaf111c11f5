"""`msa-tiles bench` without a GPU: recorded rows, and what is said about bad calls."""

from __future__ import annotations

import json

import pytest
import torch
from invented import everything, row

from msa_tiles.bench import charts, session
from msa_tiles.bench.session import DeviceLost, Done
from msa_tiles.cli import main
from msa_tiles.runtime import facts, toolchain


@pytest.fixture
def file(tmp_path):
    """All rows there can be."""
    return write(tmp_path / "rows.jsonl", everything())


def write(path, results):
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    return path


def test_recorded_rows_become_a_table_and_charts(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    some = [result for result in everything() if result["precision"] == "bf16"]
    file = write(tmp_path / "rows.jsonl", some)
    assert main(["bench", "--from", str(file), "--charts", str(tmp_path / "charts")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("NVIDIA H100 80GB HBM3, 2026-01-31\nop ")
    assert f"wrote {tmp_path / 'charts' / 'speed_up.svg'}" in shown
    assert (tmp_path / "charts" / "roofline.png").is_file()


def test_recorded_rows_are_chosen_like_cases(file, capsys):
    arguments = ["combine", "--cases", "prefill_4k,prefill_32k", "--backend", "cutedsl", "--from", str(file)]
    assert main(["bench", *arguments]) == 0
    heading, *lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert heading[:2] == ["op", "case"]
    assert [line[:4] for line in lines] == [
        ["combine", "prefill_4k", "bf16", "-"],
        ["combine", "prefill_32k", "bf16", "-"],
    ]


def test_several_files_are_read_in_order(file, tmp_path, capsys):
    later = write(tmp_path / "later.jsonl", [row("combine", "prefill_4k", ms=7.0)])
    main(["bench", "combine", "--from", str(file), "--from", str(later)])
    assert "7.0000" in capsys.readouterr().out


def test_each_card_has_a_table_of_its_own(tmp_path, capsys):
    other = row("combine", "prefill_4k", "cutedsl", ms=7.0) | {"card": "NVIDIA H200"}
    own = row("combine", "prefill_4k", ms=5.0)
    later = write(tmp_path / "later.jsonl", [own, other, own | {"ms": 6.0}])
    assert main(["bench", "combine", "--from", str(later)]) == 0
    shown = capsys.readouterr().out
    first, second = shown.split("NVIDIA H200, ")
    assert first.startswith("NVIDIA H100 80GB HBM3, ") and "6.0000" in first and "7.0000" not in first
    assert "7.0000" in second and "6.0000" not in second
    assert main(["bench", "combine", "--from", str(later), "--gates"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("verdict") == 2 and shown.count("\nNVIDIA H200\n") == 1


def test_gates_decide_the_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("msa_tiles.bench.gates.GATES", ())
    file = write(tmp_path / "rows.jsonl", [row("topk_select", "prefill_128k_u", ms=1.0, baselines={"flashinfer": 1.1})])
    assert main(["bench", "--from", str(file)]) == 0
    capsys.readouterr()
    monkeypatch.undo()
    assert main(["bench", "--from", str(file), "--gates"]) == 1
    shown = capsys.readouterr().out
    assert (
        "1.10   1.2   1.6   MISSED" in shown and "left out: first call with a pack" in shown and "not measured" in shown
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["combine"], "there is no CUDA device here; kernels are timed on one; --from FILE shows rows of earlier runs"),
        (["attention"], "benchmark OP attention is unknown; did you mean"),
        (["--cases", "prefill_1k"], "--cases prefill_1k is unknown; did you mean prefill_"),
        (["--peers", "vllm,nobody"], "--peers nobody is unknown; known: vllm, fa4"),
        (["--backend", "triton"], "--backend triton is unknown; known: tilelang, cutedsl"),
        (["--seconds", "0"], "--seconds is 0, wanted more than 0"),
        (
            ["decode_score", "--precision", "q16k4m8"],
            "--precision q16k4m8: q16k4m8 is a form of kernels of q16k4, which no call chooses by name; --precision "
            "q16k4 times what calls run, and `msa-tiles tune --op decode_score --precision q16k4m8` times the forms",
        ),
        (["--precision", "bf16,q16k4m8+q16kv8"], "; --precision q16k4+q16kv8 times what calls run"),
        (
            ["--agreement", "--precision", "bf16,q16k4m8"],
            "by name; it stores what q16k4 stores, and --agreement --precision q16k4 counts the blocks that are chosen",
        ),
        (["--from", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_bad_calls_are_answered_in_one_sentence(arguments, complaint, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_files_without_such_rows_are_said(tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [row("combine", "prefill_4k")])
    assert main(["bench", "index_score", "--from", str(file)]) == 2
    assert f"--from: no row is of what was asked for in {file}" in capsys.readouterr().err
    assert main(["bench", "--from", str(write(file, []))]) == 2
    assert f"--from: there are no rows in {file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ms": "fast"}, "ms is 'fast', wanted milliseconds"),
        ({"ms": 0}, "ms is 0, wanted milliseconds"),
        ({"ms": float("nan")}, "ms is nan, wanted milliseconds"),
        ({"floor_ms": []}, "floor_ms is [], wanted milliseconds or null"),
        ({"baselines": []}, "baselines is [], wanted milliseconds by peer"),
        ({"baselines": {"vllm": None}}, "baselines is {'vllm': None}, wanted milliseconds by peer"),
        ({"dsl": "triton"}, "dsl is 'triton', wanted tilelang or cutedsl"),
        *(
            ({name: 3}, f"{name} is 3, wanted a string")
            for name in ("op", "case", "precision", "digest", "card", "date")
        ),
        ({"precision": "q8k9"}, "--from: the precision of rows, q8k9 is unknown; did you mean q8k8?"),
        ({"precision": "q8k8+kv8"}, "--from: the precision of rows, kv8 is unknown"),
    ],
)
def test_a_field_of_a_row_that_is_none_is_named(changes, sentence, tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", [row("combine", "prefill_4k"), row("combine", "prefill_4k") | changes])
    assert main(["bench", "--from", str(file)]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err and len(shown.err.splitlines()) == 1 and not shown.out
    assert "precision" in changes or f"{file}:2 is no row of results: " in shown.err


def test_a_file_that_is_no_text_is_named(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe")
    assert main(["bench", "--from", str(tmp_path / "rows.jsonl")]) == 2
    assert f"{tmp_path / 'rows.jsonl'} is no file of results: it is not text" in capsys.readouterr().err


def test_charts_without_matplotlib_are_refused_before_anything_is_timed(file, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(charts, "available", lambda: False)
    assert main(["bench", "--from", str(file), "--charts", str(tmp_path)]) == 2
    assert "--charts needs matplotlib: pip install" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU is only said to be there; `session.run` is the test's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(toolchain, "missing", lambda dsl: None)
    found = facts.DeviceFacts("NVIDIA H100 80GB HBM3", "sm90", 132, (9, 0))
    monkeypatch.setattr(facts, "device_facts", lambda device, targets: found)
    asked = []

    def install(outcomes):
        def run(jobs, settings, device, *rest):
            asked.append((jobs, settings, device))
            yield from outcomes(jobs)

        monkeypatch.setattr(session, "run", run)
        return asked

    return install


def test_rows_are_written_as_they_come(gpu, tmp_path, capsys):
    """What is done before the device is lost is kept, and shown."""

    def outcomes(jobs):
        yield Done(jobs[0], (row("combine", "prefill_4k"), row("combine", "prefill_4k", "cutedsl")))
        assert len(out.read_text().splitlines()) == 2
        raise DeviceLost("the device stopped answering")

    out = tmp_path / "deep" / "out.jsonl"
    asked = gpu(outcomes)
    assert main(["bench", "combine", "--out", str(out), "--seconds", "0.5"]) == 1
    [(jobs, settings, device)] = asked
    assert [str(job) for job in jobs] == ["combine prefill_4k bf16", "combine prefill_32k bf16"]
    assert settings == session.Settings(("tilelang", "cutedsl"), None, 0.5) and device == torch.device("cuda", 0)
    shown = capsys.readouterr()
    assert "combine  prefill_4k" in shown.out and "the device stopped answering" in shown.err


def test_options_reach_the_run(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = gpu(lambda jobs: (Done(job, (row("combine", job.label),)) for job in jobs))
    names = ["--backend", "cutedsl", "--backend", "tilelang", "--peers", "vllm,fa4", "--peers", "torch"]
    assert main(["bench", "combine", *names]) == 0
    assert main(["bench", "combine", "--peers", "none", "--backend", "cutedsl", "--cases", "prefill_4k"]) == 0
    assert asked[0][1] == session.Settings(("tilelang", "cutedsl"), ("vllm", "fa4", "torch"), 1.0)
    assert asked[1][1] == session.Settings(("cutedsl",), (), 1.0)
    assert len((tmp_path / "msa_bench" / "nvidia-h100-80gb-hbm3.jsonl").read_text().splitlines()) == 3


def test_failures_are_told_last_and_fail_the_command(gpu, tmp_path, capsys):
    gpu(lambda jobs: (Done(job, (), "", (f"{job}: scores are off",)) for job in jobs))
    assert main(["bench", "combine", "--out", str(tmp_path / "out.jsonl")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "combine prefill_32k bf16: scores are off"


def test_dsls_that_are_not_installed_are_left_out(gpu, tmp_path, capsys, monkeypatch):
    asked = gpu(lambda jobs: (Done(job) for job in jobs))
    monkeypatch.setattr(toolchain, "missing", lambda dsl: "no such library" if dsl == "cutedsl" else None)
    assert main(["bench", "combine", "--out", str(tmp_path / "out.jsonl")]) == 0
    assert asked[0][1].dsls == ("tilelang",)
    assert "cutedsl is left out: no such library" in capsys.readouterr().err
