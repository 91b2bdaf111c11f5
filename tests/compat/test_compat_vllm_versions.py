"""vLLM's with other files than we know: made of those of `MSA_TILES_VLLM_FILES`, without something that we replace."""

from __future__ import annotations

import importlib

import pytest
from compat.stand_ins import source_of
from compat.vllm_layer import vllm_files


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("common.indexer", "select_indexer_impl_cls"),
        ("common.sparse_attention", "MiniMaxM3SparseTritonImpl"),
        ("nvidia.model", "select_main_backend_and_impl_cls"),
    ],
)
def test_another_vllm_keeps_its_own(caplog, module, name):
    """One that lacks what we replace serves its model as if we were not there."""
    with vllm_files(source_of("vllm", "MSA_TILES_VLLM_FILES")):
        modules = (
            importlib.import_module("vllm.models.minimax_m3.nvidia.model"),
            importlib.import_module(f"vllm.models.minimax_m3.{module}"),
        )
        delattr(modules[1], name)
        attention = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
        chosen = attention.select_main_backend_and_impl_cls
        ours = importlib.import_module("msa_tiles.compat.vllm.model")
        assert ours.MiniMaxM3SparseForCausalLM is modules[0].MiniMaxM3SparseForCausalLM
        assert attention.select_main_backend_and_impl_cls is chosen and chosen.__module__ == attention.__name__
    assert "it knows vLLM 0.33, and this one is another" in caplog.text and name in caplog.text
