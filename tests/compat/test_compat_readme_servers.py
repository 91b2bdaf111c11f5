"""What the README shows of other packages' surfaces runs, on the names of its own examples."""

from __future__ import annotations

import re
from pathlib import Path

import torch

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str, heading: str = "") -> str:
    """The first block of a language behind a heading."""
    text = TEXT.partition(f"\n{heading}\n")[2] if heading else TEXT
    return re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[1]


def test_vllms_operators_answer_as_a_decode_step_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the GPU here may be one without kernels
    names: dict = {}
    exec(block("python").partition("block_indices =")[0].replace("1024", "16"), names)
    exec(block("py", "### Decode"), names)
    wanted, ids = names["out"], names["buffers"]["block_indices"].clone()
    exec(block("py", "### vLLM"), names)
    assert torch.equal(names["block_ids"].sort(-1)[0], ids.sort(-1)[0]) and names["block_ids"].shape == (4, 3, 4)
    # The same blocks in another order.
    torch.testing.assert_close(names["answer"].float(), wanted.float(), atol=0.02, rtol=0.02)
    assert not names["answer"][2].any()
