"""What servers find through their entry points. Neither torch nor a server is imported before one calls.

A plugin runs in every process of a server, more than once in some, and whatever goes wrong in it would stop the server:
so it registers by name only, and tells the log instead of raising.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

VLLM_MODELS = (
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3MTP",
)
SGLANG_MODULE = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
_OFF = ("0", "off", "false", "no")


def vllm() -> None:
    """`vllm.general_plugins`: let vLLM take its MiniMax-M3 models from `msa_tiles.compat.vllm.model`.

    Nothing of it is imported before such a model is served. ``MSA_TILES_VLLM=0`` switches it off. Never raises.
    """
    log = logging.getLogger("vllm.msa_tiles")
    try:
        if switched_off("MSA_TILES_VLLM"):
            log.info("msa_tiles leaves MiniMax M3 to vLLM: MSA_TILES_VLLM is 0")
            return
        from vllm.model_executor.models.registry import ModelRegistry

        known = ModelRegistry.models
        for name in VLLM_MODELS:
            if name in known:
                ModelRegistry.register_model(name, f"msa_tiles.compat.vllm.model:{name}")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            log.warning("msa_tiles has nothing to do for vLLM, which is not installed")
        else:
            log.warning("msa_tiles leaves MiniMax M3 to vLLM: its plugin failed", exc_info=True)


def sglang() -> None:
    """`sglang.srt.plugins`: wrap SGLang's sparse prefill and decode of MiniMax M3 in `msa_tiles.compat.sglang.hooks`.

    Nothing of it is imported before one of them is called. ``MSA_TILES_SGLANG=0`` switches it off. Never raises.
    """
    log = logging.getLogger("sglang.msa_tiles")
    try:
        if switched_off("MSA_TILES_SGLANG"):
            log.info("msa_tiles leaves MiniMax M3 to SGLang: MSA_TILES_SGLANG is 0")
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{SGLANG_MODULE}.minimax_sparse_prefill", _sglang_prefill, HookType.AROUND)
        HookRegistry.register(f"{SGLANG_MODULE}.minimax_sparse_decode", _sglang_decode, HookType.AROUND)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "sglang":
            log.warning("msa_tiles has nothing to do for SGLang, which is not installed")
        else:
            log.warning("msa_tiles leaves MiniMax M3 to SGLang: its plugin failed", exc_info=True)


def _sglang_prefill(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    from msa_tiles.compat.sglang import hooks

    return hooks.prefill(original, *given, **named)


def _sglang_decode(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    from msa_tiles.compat.sglang import hooks

    return hooks.decode(original, *given, **named)


def switched_off(variable: str) -> bool:
    """Whether the environment says no."""
    return os.environ.get(variable, "").strip().lower() in _OFF
