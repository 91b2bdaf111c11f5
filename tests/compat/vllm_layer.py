"""A sparse layer of MiniMax M3 from vLLM's own files: its classes, metadata and builders, under small stand-ins.

What the layer computes besides attention is left out: `hidden_states` are q, k, v and the indexer's q and k, and what
comes back is attention's output.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from compat.m3 import DIM, FP8, PAGE, Batch, Parameters
from compat.stand_ins import Finder, Hollow, Source, standing_in
from torch import Tensor, nn

REGISTRY = "vllm.model_executor.models.registry"
REAL = (
    "vllm.models.minimax_m3",
    "vllm.models.minimax_m3.common",
    "vllm.models.minimax_m3.common.indexer",
    "vllm.models.minimax_m3.common.sparse_attention",
    "vllm.models.minimax_m3.common.ops",
    "vllm.models.minimax_m3.common.ops.",
    "vllm.models.minimax_m3.nvidia",
    "vllm.models.minimax_m3.nvidia.model",
    "vllm.models.minimax_m3.nvidia.mtp",
    "vllm.model_executor.layers.attention_layer_base",
    REGISTRY,
    "vllm.utils.math_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
)
OURS = ("msa_tiles.compat.vllm.model", "msa_tiles.compat.vllm.layers")
LAYER = "model.layers.3.self_attn"
MOST_TOKENS = 512


class State:
    """What vLLM keeps in globals."""

    def __init__(self) -> None:
        self.config: Any = None
        self.context: Any = None
        self.cuda = True


def log_of_vllm(name: str) -> logging.Logger:
    found = logging.getLogger(name)
    found.info_once = found.warning_once = lambda *given: None  # type: ignore[attr-defined]
    return found


class Plain(nn.Module):
    """A linear layer that leaves its input alone."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def set_default_quant_scales(layer: nn.Module, register_buffer: bool = False) -> None:
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        layer.register_buffer(name, torch.tensor(1.0))
        setattr(layer, f"{name}_float", 1.0)


def insert(
    qkv: Tensor, q_norm: Any, k_norm: Any, rope: Any, positions: Any, heads: int, kv_heads: int, rotary_dim: int,
    eps: float, index_q_norm: Any, index_k_norm: Any, index_heads: int, slots: Tensor, index_slots: Tensor,
    cache: Tensor, index_cache: Tensor, page: int, q: Tensor, index_q: Tensor, dtype: str, **further: Any,
) -> None:  # fmt: skip
    """The layer's fused operator without norms and rotary embedding: it splits, and writes into the caches."""
    parts = qkv.split([heads * DIM, kv_heads * DIM, kv_heads * DIM, index_heads * DIM, DIM], dim=-1)
    q.copy_(parts[0])
    index_q.copy_(parts[3])
    live = slots >= 0
    stored = cache.view(FP8) if cache.dtype == torch.uint8 else cache
    rows = torch.cat([part.view(-1, kv_heads, DIM) for part in parts[1:3]], -1)[live].to(stored.dtype)
    for number, slot in enumerate(slots[live].tolist()):
        stored[slot // page, :, slot % page] = rows[number]
    for row, slot in zip(parts[4][index_slots >= 0], index_slots[index_slots >= 0].tolist(), strict=True):
        index_cache[slot // page, slot % page] = row.to(index_cache.dtype)


def names(state: State) -> dict[str, dict[str, Any]]:
    """What the real files take from modules that are not real."""
    platform = SimpleNamespace(
        is_cuda=lambda: state.cuda,
        is_rocm=lambda: False,
        is_cpu=lambda: False,
        is_xpu=lambda: False,
        is_cuda_alike=lambda: True,
        is_device_capability=lambda capability, *rest: tuple(capability) == (9, 0),
        is_device_capability_family=lambda family: family == 90,
        is_fp8_fnuz=lambda: False,
        fp8_dtype=lambda: FP8,
        supports_fp8=lambda: True,
        is_arch_support_pdl=lambda: True,
    )
    dtypes = {"bfloat16": torch.bfloat16, "auto": torch.bfloat16}
    found: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": log_of_vllm},
        "vllm.platforms": {"current_platform": platform},
        "vllm._aiter_ops": {
            "rocm_aiter_ops": SimpleNamespace(is_enabled=lambda: False, is_shuffle_kv_cache_enabled=lambda: False)
        },
        "vllm._custom_ops": {"fused_minimax_m3_qknorm_rope_kv_insert": insert},
        "vllm.config": {
            "get_current_vllm_config": lambda: state.config,
            "get_current_vllm_config_or_none": lambda: state.config,
        },
        "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda dtype: None},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
        "vllm.distributed.parallel_state": {
            "get_dcp_world_size_and_rank": lambda several: (1, 0),
            "get_pcp_group": lambda: SimpleNamespace(world_size=1, rank_in_group=0),
        },
        "vllm.forward_context": {"get_forward_context": lambda: state.context},
        "vllm.utils.torch_utils": {
            "kv_cache_dtype_str_to_dtype": lambda dtype, model: dtypes.get(dtype, torch.uint8),
            "get_dtype_size": lambda dtype: dtype.itemsize,
        },
        "vllm.model_executor.layers.attention.attention": {"set_default_quant_scales": set_default_quant_scales},
        "vllm.model_executor.layers.linear": {
            "MinimaxM3QKVParallelLinearWithIndexer": Plain,
            "RowParallelLinear": Plain,
        },
        "vllm.model_executor.layers.rotary_embedding": {
            "get_rope": lambda *given, **named: SimpleNamespace(cos_sin_cache=None, rotary_dim=64)
        },
        "vllm.v1.spec_decode.utils": {},
    }
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = Hollow()
    found["vllm.triton_utils"] = {"triton": triton, "tl": tl}
    return found


@contextmanager
def vllm_files(source: Source) -> Iterator[State]:
    """vLLM's files, importable until the end of the block, and our model module with them."""
    state = State()
    finder = Finder(source, "vllm", REAL, hollow=("transformers", "regex", "flashinfer", "cloudpickle"))
    with standing_in(finder, names(state), leaving=OURS.__contains__):
        yield state


class Layer:
    """A layer with bound caches, and its builders of metadata."""

    def __init__(
        self, state: State, batch: Batch, given: Parameters, *, drafts: int = 0, shared_table: bool = True
    ) -> None:
        self.state, self.batch, self.given = state, batch, given
        self.shared_table = shared_table
        device = batch.q.device
        quantised, index_quantised = batch.cache.dtype == FP8, batch.index_cache.dtype == FP8
        sparse = {
            "sparse_num_index_heads": batch.num_kv_heads,
            "sparse_index_dim": DIM,
            "sparse_topk_blocks": given.topk,
            "sparse_block_size": PAGE,
            "sparse_init_block": given.init_blocks,
            "sparse_local_block": given.local_blocks,
        }
        config = SimpleNamespace(
            hidden_size=(batch.num_q_heads + 3 * batch.num_kv_heads + 1) * DIM,
            num_attention_heads=batch.num_q_heads,
            num_key_value_heads=batch.num_kv_heads,
            head_dim=DIM,
            rms_norm_eps=1e-6,
            max_position_embeddings=1 << 20,
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            sparse_attention_config=sparse,
        )
        drafting = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
        state.config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16, hf_config=config),
            compilation_config=SimpleNamespace(static_forward_context={}),
            attention_config=SimpleNamespace(
                resolve_indexer_kv_dtype=lambda default: "fp8" if index_quantised else default,
                minimax_m3_msa_decode_backend="triton",
                minimax_m3_indexer_cp=False,
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST_TOKENS),
            speculative_config=drafting if drafts else None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="fp8" if quantised else "auto", block_size=PAGE),
        )
        # By vLLM's file, as any module of it finds the class.
        model = importlib.import_module("vllm.models.minimax_m3.nvidia.model")
        buffer = torch.full((MOST_TOKENS, batch.num_kv_heads, given.topk), -9, dtype=torch.int32, device=device)
        self.layer = model.MiniMaxM3SparseAttention(
            config, 3, None, LAYER, cache_config=state.config.cache_config, topk_indices_buffer=buffer
        ).to(device)
        self.layer.kv_cache = batch.cache.view(torch.uint8) if quantised else batch.cache
        self.layer.indexer.index_cache.bind_kv_cache(batch.index_cache[:, None])
        self.builders = {}
        for name, module in (
            (self.layer.layer_name, self.layer),
            (self.layer.indexer.index_cache.prefix, self.layer.indexer.index_cache),
        ):
            spec = module.get_kv_cache_spec(state.config)
            builder = module.get_attn_backend().get_builder_cls()
            self.builders[name] = builder(spec, [name], state.config, device)

    def common(self, padded: int, tokens: int, most: int) -> Any:
        """vLLM's description of the batch; the last ``padded`` requests have neither queries nor keys."""
        backend = importlib.import_module("vllm.v1.attention.backend")
        batch, device = self.batch, self.batch.q.device
        real = len(batch.queries) - padded
        starts = torch.tensor([0, *batch.queries[:real], *[0] * padded]).cumsum(0).to(torch.int32)
        return backend.CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=batch.seq_lens,
            seq_lens_cpu_upper_bound=torch.tensor(batch.lengths, dtype=torch.int32),
            num_reqs=len(batch.queries),
            num_actual_tokens=tokens,
            max_query_len=max(batch.queries),
            max_seq_len=most,
            block_table_tensor=batch.table,
            slot_mapping=self.slots(),
        )

    def slots(self) -> Tensor:
        """Where the key of each query lies; -1 for queries that pad."""
        found = [
            -1 if position < 0 else int(self.batch.table[request, position // PAGE]) * PAGE + position % PAGE
            for request, position in self.batch.rows
        ]
        return torch.tensor(found, device=self.batch.q.device)

    def hidden_states(self) -> Tensor:
        """The rows that the layer's projection would give: q, k, v, and q and k of the indexer."""
        batch, slots = self.batch, self.slots()
        pages, places = slots.clamp_min(0) // PAGE, slots.clamp_min(0) % PAGE
        k, v = (part[pages, :, places].flatten(1) for part in batch.cache.to(torch.bfloat16).split(DIM, -1))
        index_k = batch.index_cache.to(torch.bfloat16)[pages, places]
        return torch.cat([batch.q.flatten(1), k, v, batch.idx_q.to(torch.bfloat16).flatten(1), index_k], -1)

    def prepare(self, padded: int = 0, most: int | None = None) -> Tensor:
        """Have the layer find this step's metadata; the rows to call it with."""
        batch, tokens = self.batch, sum(self.batch.queries)
        common = self.common(padded, tokens, max(batch.lengths) if most is None else most)
        metadata = {}
        for name, builder in self.builders.items():
            mine = common
            if not self.shared_table and name != self.layer.layer_name:
                mine = common.replace(block_table_tensor=batch.table.clone())
            metadata[name] = builder.build(0, mine)
        self.state.context = SimpleNamespace(
            attn_metadata=metadata,
            slot_mapping=dict.fromkeys(self.builders, common.slot_mapping),
            no_compile_layers=self.state.config.compilation_config.static_forward_context,
        )
        return self.hidden_states()

    def forward(self, padded: int = 0, most: int | None = None) -> Tensor:
        """The layer's forward: out [T, Hq, D]."""
        hidden = self.prepare(padded, most)
        out = self.layer(torch.zeros(len(hidden), device=hidden.device), hidden)
        return out.view(len(hidden), self.batch.num_q_heads, DIM)

    def attend(self, output: Tensor) -> None:
        """What a full graph captures of the layer, on the batch's queries, into ``output`` [T, Hq, D]."""
        self.layer._run_attention(self.batch.q.flatten(1), None, self.batch.idx_q.flatten(1), output.flatten(1))

    @property
    def ids(self) -> Tensor:
        """What the layer selected: int32 [Hkv, T, topk]."""
        return self.layer.topk_indices_buffer[: sum(self.batch.queries)].transpose(0, 1)
