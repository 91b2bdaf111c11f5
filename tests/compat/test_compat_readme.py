"""The README's examples of drop-ins run as they stand, on small models."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from msa_tiles.compat import transformers as compat

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def example(section: str) -> str:
    """The one Python example of a section."""
    part = TEXT.split(f"### {section}\n", 1)[1].split("\n#", 1)[0]
    [block] = re.findall(r"```py\n(.*?)```", part, flags=re.DOTALL)
    return block


def test_flash_msa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the GPU here may be one without kernels
    block = example("flash-msa, FlashInfer, fmha_sm100")
    assert block.count("512") == 2
    names: dict = {}
    exec(compile(block.replace("512", "300"), "README.md", "exec"), names)
    assert names["out"].shape == (2, 300, 16 * 128) and float(names["kl"].detach()) > 0
    assert all(bool(leaf.grad.any()) for leaf in names["leaves"].values())


def test_modules_and_functions_of_the_table_exist() -> None:
    rows = re.findall(r"^\| .* \| `(msa_tiles\.compat\.\w+)` \| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == 3
    for module, told in rows:
        for name in re.findall(r"`(\w+)`", told):
            assert callable(getattr(importlib.import_module(module), name)), name


def test_transformers(tmp_path: Path) -> None:
    from compat.small_m3 import modeling, small_model

    assert modeling.MiniMaxM3VLIndexer  # else skipped

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
