"""The commands explain, support, build and verify, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from msa_tiles import cli, trees
from msa_tiles.codegen.digest import digest_of
from msa_tiles.runtime import registry as registry_module
from msa_tiles.runtime.build import Job, Outcome
from msa_tiles.runtime.facts import DeviceFacts
from msa_tiles.runtime.registry import Registry


@pytest.fixture
def generated(registry: Registry, tmp_path: Path) -> Path:
    """A copy of the tiny registry whose digest is right, in the header and in the index."""
    directory = tmp_path / "generated"
    shutil.copytree(registry.directory, directory, ignore=shutil.ignore_patterns("__pycache__"))
    index = json.loads((directory / "index.json").read_text())
    kernel = directory / index["cells"][0]["file"]
    digest = digest_of(kernel.read_text(), "tilelang", "sm_90a")
    kernel.write_text(f"# cell: scale_rows.tilelang.sm90.bf16   digest: {digest}\n\n{kernel.read_text()}")
    index["cells"][0]["digest"] = digest
    (directory / "index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture(autouse=True)
def own_registry_and_cache(generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "default_registry", lambda: Registry.read(generated))
    monkeypatch.setenv("MSA_TILES_CACHE_DIR", str(tmp_path / "cache"))


def support(capsys: pytest.CaptureFixture[str]) -> dict:
    assert cli.main(["support", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    return row


def test_support_prints_an_object_for_each_cell(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    row = support(capsys)
    wanted = ["id", "op", "dsl", "target", "precision", "group", "algorithm", "status", "flags", "file", "digest"]
    assert list(row) == [*wanted, "tree", "verified", "compiled", "timed"]
    assert (row["verified"], row["compiled"], row["timed"]) == (None, None, [])
    assert [row[name] for name in wanted[1:7]] == ["scale_rows", "tilelang", "sm90", "bf16", "bf16", ""]
    assert (row["status"], row["flags"]) == ("generated", ["generated"])
    assert (generated / row["file"]).exists()


def test_a_hand_edit_takes_generated_away(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    kernel = generated / support(capsys)["file"]
    kernel.write_text(kernel.read_text().replace("* factor", "+ factor"))
    assert (support(capsys)["status"], support(capsys)["flags"]) == ("edited", [])
    kernel.unlink()
    assert (support(capsys)["status"], support(capsys)["flags"]) == ("missing", [])


@pytest.mark.parametrize("edit", ["name = 1\n", "def (\n", "\udcff"])
def test_a_hand_edit_takes_verified_away(edit: str, capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    row = support(capsys)
    entry = {"scale_rows.tilelang.sm90.bf16": {"digest": row["digest"]}}
    (generated / "verified.json").write_text(json.dumps(entry))
    with (generated / row["file"]).open("a", encoding="utf-8", errors="surrogateescape") as kernel:
        kernel.write(edit)
    row = support(capsys)
    assert (row["status"], row["flags"], row["verified"]["current"]) == ("edited", [], False)


def test_support_refuses_filters_that_match_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--json"]):
        assert cli.main(["support", "--dsl", "cutedsl", *arguments]) == 2
        printed = capsys.readouterr()
        assert "no cell matches --dsl cutedsl" in printed.err and not printed.out


def test_a_path_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["generate", "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_run_with_this_digest_makes_it_verified(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    row = support(capsys)
    entry = {"scale_rows.tilelang.sm90.bf16": {"digest": row["digest"]}}
    (generated / "verified.json").write_text(json.dumps(entry))
    assert (support(capsys)["status"], support(capsys)["flags"]) == ("verified", ["generated", "verified"])


def entry(row: dict, **errors: object) -> dict:
    return {"digest": row["digest"], "card": "NVIDIA H200", "date": "2026-11-30", "cases": 3} | errors


def accuracy(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert cli.main(["support", "--accuracy", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_accuracy_names_output_metric_and_bound(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    cell, row = "scale_rows.tilelang.sm90.bf16", support(capsys)
    assert accuracy(capsys) == []
    assert cli.main(["support", "--accuracy"]) == 0
    assert "no cell that was asked for has run on a GPU" in capsys.readouterr().out
    errors = {"out": {"worst": 0.0078, "accepted": 0.02, "metric": "absolute"}}
    (generated / "verified.json").write_text(json.dumps({cell: entry(row, errors=errors)}))
    about = {"cell": cell, "card": "NVIDIA H200", "date": "2026-11-30", "current": True}
    assert accuracy(capsys) == [about | {"output": "out"} | errors["out"]]
    assert cli.main(["support", "--accuracy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split("  ")[0] == cell and "0.0078" in lines[-1] and "0.02" in lines[-1]


def test_accuracy_of_an_entry_with_one_number(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    """As `verify` wrote them before it named outputs; of a kernel that has changed since."""
    row = support(capsys)
    old = entry(row, worst_error=0.01, digest="f" * 16)
    (generated / "verified.json").write_text(json.dumps({"scale_rows.tilelang.sm90.bf16": old}))
    [found] = accuracy(capsys)
    assert (found["output"], found["worst"], found["accepted"], found["current"]) == ("all outputs", 0.01, None, False)


@pytest.mark.parametrize("errors", [[], {"out": 3}, {"out": {"worst": "small"}}])
def test_accuracy_refuses_what_verify_did_not_write(
    errors: object, capsys: pytest.CaptureFixture[str], generated: Path
) -> None:
    written = {"scale_rows.tilelang.sm90.bf16": entry(support(capsys), errors=errors)}
    (generated / "verified.json").write_text(json.dumps(written))
    assert cli.main(["support", "--accuracy"]) == 2
    assert "the entry of scale_rows.tilelang.sm90.bf16 is not what `msa-tiles verify` writes" in capsys.readouterr().err


def test_support_has_cards_dates_and_errors(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    row = support(capsys)
    ran = {"digest": row["digest"], "card": "NVIDIA H200", "date": "2026-11-30", "worst_error": 0.25, "cases": 9}
    (generated / "verified.json").write_text(json.dumps({row["id"]: ran}))
    figure = {"op": row["op"], "target": "sm90", "precision": "bf16", "workload": "long", "queries": 8, "ms": {}}
    figure |= {"card": "NVIDIA H100", "date": "2026-11-29", "digests": {}}
    figures = [figure | {"ms": {row["id"]: 1.5}, "digests": {row["id"]: digest}} for digest in (row["digest"], "older")]
    (generated / "tuned.json").write_text(json.dumps({"figures": figures}))
    row = support(capsys)
    assert row["verified"] == {**ran, "current": True}
    timed = {"workload": "long", "queries": 8, "ms": 1.5, "card": "NVIDIA H100", "date": "2026-11-29"}
    assert row["timed"] == [{**timed, "current": True}, {**timed, "current": False}]
    assert cli.main(["support"]) == 0
    [heading, line] = capsys.readouterr().out.splitlines()
    assert line[heading.index("verified on") :].split("  ")[0] == "NVIDIA H200, 2026-11-30"


def test_explain_says_when_there_is_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["explain", "scale_rows"]) == 0
    assert capsys.readouterr().out.startswith("no CUDA device here: as if on sm90\n")


@pytest.mark.slow
def test_build_fills_the_cache_and_makes_it_compiled(
    capsys: pytest.CaptureFixture[str], generated: Path, tmp_path: Path, nvcc: Path
) -> None:
    assert cli.main(["build", "--audit"]) == 0
    printed = capsys.readouterr()
    assert "2 of 2 variants are compiled and audited" in printed.out
    assert "compiling: 2/2" in printed.err
    assert support(capsys)["flags"] == ["generated", "compiled"]
    assert cli.main(["explain", "scale_rows", "--device", "sm90"]) == 0
    assert "serves it as width=64 capacity=4, from the cache" in capsys.readouterr().out
    assert not (generated / "verified.json").exists()
    index = json.loads((generated / "index.json").read_text())
    index["cells"][0]["forbid"] = ["FMUL"]
    (generated / "index.json").write_text(json.dumps(index))
    assert cli.main(["build", "--audit"]) == 1
    assert "the code has FMUL, which the plan forbids" in capsys.readouterr().out
    assert support(capsys)["flags"] == ["generated"]


def test_build_refuses_filters_that_match_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "--op", "scale_rows", "--dsl", "cutedsl"]) == 2
    assert "no cell matches --op scale_rows --dsl cutedsl" in capsys.readouterr().err
    assert cli.main(["build", "--jobs", "0"]) == 2


def test_an_audit_that_cannot_be_recorded_is_no_success(
    capsys: pytest.CaptureFixture[str], generated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "msa_tiles.runtime.build.build", lambda jobs, *_, **__: [Outcome(j, None, 0.0, ()) for j in jobs]
    )
    (generated / "compiled.json").mkdir()
    assert cli.main(["build", "--audit"]) == 1
    assert "compiled.json" in capsys.readouterr().err
    assert cli.main(["build"]) == 0


def test_an_audit_of_an_installation_is_a_success_that_is_not_recorded(
    capsys: pytest.CaptureFixture[str], generated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "msa_tiles.runtime.build.build", lambda jobs, *_, **__: [Outcome(j, None, 0.0, ()) for j in jobs]
    )
    monkeypatch.setattr(trees, "INSTALLATION", generated.parent)
    assert cli.main(["build", "--audit"]) == 0
    assert f"nothing is recorded: {generated} came with the installation" in capsys.readouterr().err
    assert not (generated / "compiled.json").exists()


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["support"]) == 2
    assert "the working directory cannot be read (No such file or directory)" in capsys.readouterr().err


def test_build_of_one_variant_is_audited_and_not_recorded(
    capsys: pytest.CaptureFixture[str], generated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def built(jobs: list[Job], *_: object, **options: object) -> list[Outcome]:
        asked.append((jobs, options))
        return [Outcome(job, None, 0.0, ()) for job in jobs]

    monkeypatch.setattr("msa_tiles.runtime.build.build", built)
    assert cli.main(["build", "--audit", "--variant", "capacity=8"]) == 0
    [([job], options)] = asked
    assert (job.variant, options["audited"]) == ({"width": 64, "capacity": 8}, True)
    assert not (generated / "compiled.json").exists()
    capsys.readouterr()
    assert cli.main(["build", "--json"]) == 0
    second, first = json.loads(capsys.readouterr().out)
    row = {"cell": "scale_rows.tilelang.sm90.bf16", "variant": {"width": 64, "capacity": 4}, "seconds": 0.0}
    assert first == row | {"registers": None, "shared_memory": None, "good": True, "result": "compiled"}
    assert second["variant"] != first["variant"]
    assert cli.main(["build", "--variant", "capacity=5"]) == 2
    assert "--variant capacity=5: scale_rows.tilelang.sm90.bf16 has 4, 8" in capsys.readouterr().err
    assert cli.main(["build", "--variant", "depth=5"]) == 2
    assert (
        "--variant depth: scale_rows.tilelang.sm90.bf16 has the dims width, capacity; name with --op"
        in capsys.readouterr().err
    )
    assert cli.main(["build", "--for", "scale_rows", "--variant", "capacity=8"]) == 2


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["explain", *arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_explain_shows_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "scale_rows", "--device", "sm90", "--variant", "capacity=5")
    assert status == 0
    assert "serves it as width=64 capacity=8, compiled on first use" in text
    assert "Runs scale_rows.tilelang.sm90.bf16" in text


def test_explain_says_that_a_kernel_was_edited(capsys: pytest.CaptureFixture[str], generated: Path) -> None:
    sentence = "its file is not what `msa-tiles generate` writes: no evidence holds for it"
    assert sentence not in explain(capsys, "scale_rows", "--device", "sm90")[1]
    kernel = generated / support(capsys)["file"]
    kernel.write_text(kernel.read_text().replace("* factor", "+ factor"))
    assert sentence in explain(capsys, "scale_rows", "--device", "sm90")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--variant", "width=96"), "refuses: width is 96, wanted one of 64, 128"),
        (("--precision", "q8k8"), "refuses: it takes bf16, the call is q8k8"),
        (("--feature", "paged"), "refuses: it does not serve paged (rows in pages of a pool)"),
        (("--backend", "cutedsl"), "refuses: it is a tilelang kernel"),
        (("--device", "cpu"), "refuses: it is for sm90, the call is on cpu (no GPU)"),
    ],
)
def test_explain_shows_refusals(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str) -> None:
    arguments = arguments if "--device" in arguments else ("--device", "sm90", *arguments)
    status, text = explain(capsys, "scale_rows", *arguments)
    assert status == 1
    assert sentence in text
    assert "No kernel serves this call" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nothing",), "operator nothing is unknown; known: dense_attention, scale_rows"),
        (("scale_rows", "--device", "sm77"), "--device sm77"),
        (("scale_rows", "--device", "sm90", "--variant", "depth=3"), "--variant of scale_rows: depth is unknown"),
    ],
)
def test_explain_refuses_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    status, text = explain(capsys, *arguments)
    assert status == 2
    assert sentence in text


def test_verify_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["verify"]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_verify_refuses_a_kernel_that_was_edited(
    capsys: pytest.CaptureFixture[str], generated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("msa_tiles.runtime.facts.device_facts", lambda *_: DeviceFacts("a GPU", "sm90", 1, (9, 0)))
    kernel = generated / support(capsys)["file"]
    kernel.write_text(kernel.read_text().replace("* factor", "+ factor"))
    assert cli.main(["verify"]) == 2
    assert "edited since `msa-tiles generate` ran: scale_rows.tilelang.sm90.bf16" in capsys.readouterr().err
    assert not (generated / "verified.json").exists()
