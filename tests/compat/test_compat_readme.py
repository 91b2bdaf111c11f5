"""The README's examples of drop-ins run as they stand, on small models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from compat.small_m3 import small_model

from msa_tiles.compat import transformers as compat

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def example(section: str) -> str:
    """The one Python example of a section."""
    part = TEXT.split(f"### {section}\n", 1)[1].split("\n#", 1)[0]
    [block] = re.findall(r"```py\n(.*?)```", part, flags=re.DOTALL)
    return block


def test_transformers(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    block = example("transformers")
    assert block.count("MiniMaxAI/MiniMax-M3") == 1
    names: dict = {}
    try:
        exec(compile(block.replace("MiniMaxAI/MiniMax-M3", str(tmp_path)), "README.md", "exec"), names)
        model = names["model"]
        assert model.config._attn_implementation == "msa_tiles" and model.dtype == torch.bfloat16
        ids = torch.arange(1, 60)[None]
        with torch.no_grad():
            assert bool(model(ids).logits.isfinite().all())
    finally:
        compat.unregister()
    with pytest.raises(ValueError, match="msa_tiles"):
        small_model().set_attn_implementation("msa_tiles")
