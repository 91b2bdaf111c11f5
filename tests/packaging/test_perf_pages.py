"""Pages and scripts under perf/: standings follow from rows, the log has its form, links lead somewhere, steps end."""

from __future__ import annotations

import functools
import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from msa_tiles.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("perf/**/*.md"), ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("script", ["standings.py", "expectations.py", "support_table.py"])
def test_what_is_written_from_rows_and_evidence_is_what_they_say(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, in this process, which has imported what it needs."""
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "perf" / script), run_name="__main__")
    assert left.value.code == 0, capsys.readouterr().err


def test_the_readme_expects_what_explain_expects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sparse_attention", "--queries", "32768", "--device", "sm90"]) == 0
    _, launches, expected, *_ = capsys.readouterr().out.splitlines()
    assert f"{launches}\n{expected}\n" in (ROOT / "README.md").read_text(), f"README should have: {expected}"


def test_the_log_is_dated_and_in_order() -> None:
    lines = [line for line in (ROOT / "perf/NOTES.md").read_text().splitlines() if line.startswith("|")]
    heading, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert heading == ["date", "commit", "what", "predicted", "got", "why"]
    assert rows
    for row in rows:
        assert len(row) == len(heading) and row[2] and row[4], row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row[0]) and re.fullmatch(r"[0-9a-f]{7,}", row[1]), row[:3]
    dates = [row[0] for row in rows]
    assert dates == sorted(dates)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^):#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_lesson_is_in_the_index() -> None:
    index = (ROOT / "perf/lessons/README.md").read_text()
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", index)) == {
        page.name for page in ROOT.glob("perf/lessons/*.md") if page.name != "README.md"
    }


def test_the_steps_of_a_gpu_have_every_file_of_gpu_tests(tmp_path: Path) -> None:
    listed = subprocess.run([sys.executable, "perf/steps.py", "--list"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    files = {path.name for path in ROOT.glob("tests/gpu/test_*.py")}
    # A step of its own runs the sanitizer, over more than the test does.
    assert set(re.findall(r"test_gpu_\w+\.py", listed.stdout)) == files - {"test_gpu_sanitizer.py"}


def test_a_step_that_is_late_says_how_far_it_came(tmp_path: Path) -> None:
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated/verified.json").touch()
    program = tmp_path / "steps.py"
    text = (ROOT / "perf/steps.py").read_text()
    start, end = text.index("STEPS = ("), text.index("def run(")
    slow = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('half of it')"
    commands = {"slow": slow, "quick": "print(7)", "timed": "print(8)"}
    steps = [
        f"Step({name!r}, 3, (sys.executable, '-c', {code!r}), {name == 'timed'})" for name, code in commands.items()
    ]
    text = text[:start] + f"STEPS = ({', '.join(steps)})\n\n\n" + text[end:]
    program.write_text(text.replace("Path(__file__).resolve().parents[1]", "Path(__file__).resolve().parent"))
    run = [sys.executable, str(program), "--out", str(tmp_path / "out")]
    # As a shell starts it in the background.
    ignoring = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    first = subprocess.run(run, capture_output=True, text=True, preexec_fn=ignoring)
    assert first.returncode == 1, first.stderr
    assert [line.split() for line in first.stdout.splitlines()] == [
        ["slow", "late", "3", "s", "half", "of", "it"],
        ["quick", "0", "0", "s", "7"],
        ["timed", "0", "0", "s", "8"],
    ]
    assert "quick" not in subprocess.run(run, capture_output=True, text=True).stderr
    # Side by side the late one holds up what takes times, and nothing else.
    lanes = subprocess.run([*run[:-1], str(tmp_path / "beside"), "--lanes", "2"], capture_output=True, text=True)
    began = re.findall(r"^(\w+): up to", lanes.stderr, re.MULTILINE)
    assert set(began[:2]) == {"slow", "quick"} and began[2] == "timed"
    ended = list(json.loads((tmp_path / "beside/steps.json").read_text()))
    assert ended == ["quick", "slow", "timed"]
