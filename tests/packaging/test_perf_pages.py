"""Pages under perf/: standings are what the rows say, the log has its form, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("perf/**/*.md"), ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("script", ["standings.py", "expectations.py"])
def test_what_is_written_from_rows_is_what_the_rows_say(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "perf" / script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
