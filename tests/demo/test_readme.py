"""What the README says is so: its example runs, its table is the evidence, its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from msa_tiles.cli import main
from msa_tiles.runtime.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_python_example_runs_and_gives_what_its_comments_say(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the GPU here may be one without kernels
    (example,) = _blocks("python")
    example = example.replace("tokens = 1024", "tokens = 320").replace("1024]", "320]")  # the shapes shrink along
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["block_indices"].shape == (4, 320, 4) and names["block_indices"].dtype == torch.int32
    assert names["out"].shape == (320, 64, 128) and names["lse"].shape == (320, 64)


def test_precisions_that_are_promised_have_kernels():
    promised = set(re.findall(r"`(q\d+k\w+)`", TEXT + (ROOT / "CHANGELOG.md").read_text()))
    assert promised and promised <= {cell.precision for cell in Registry.read(ROOT / "generated").cells}


@pytest.mark.parametrize("block", _blocks("console"))
def test_shown_output_is_the_real_output(block, capsys):
    command, _, shown = block.partition("\n")
    assert command.startswith("$ msa-tiles ")
    main(shlex.split(command)[2:])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", sorted(set(re.findall(r"msa-tiles (\w+)", TEXT))))
def test_every_command_named_exists(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^):]+)\)", TEXT))))
def test_links_lead_somewhere(link):
    path, _, section = link.partition("#")
    assert (ROOT / path).exists()
    if section:
        text = (ROOT / (path or "README.md")).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        assert section in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
