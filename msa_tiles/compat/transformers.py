"""MiniMax-M3 of the package transformers over our operators: ``attn_implementation="msa_tiles"``.

    from msa_tiles.compat.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="msa_tiles", dtype=torch.bfloat16)

Layers with an indexer select with `ops.select_blocks` and attend with `ops.sparse_attention` (up to 32 new tokens:
`ops.decode_score`, `ops.decode_topk` and `ops.sparse_decode`), layers without one attend with `ops.dense_attention`.
The float32 scores [B, Hi, Sq, Sk] of the original are never made. transformers is imported by `register`, not before.

A token's block is its position in its own sequence divided by the block size. So a row of a left-padded batch, or a
packed sequence, has the answer that it has alone. The original counts blocks from the first slot of the row, padding
and other sequences included; where there is neither, both say the same.

A selection has no gradient: as in the original, training moves all parameters but the indexers'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.compat import heads_first
from msa_tiles.compat.slots import Slots

__all__ = ["NAME", "Registration", "register", "unregister"]

NAME = "msa_tiles"
FEW_QUERIES = 32  # up to so many for each row the decode operators serve
_PARAMETERS = ("hidden_states", "position_embeddings", "cache", "position_ids")


class Indexed(NamedTuple):
    """What the indexer hands to attention in place of block ids: queries [B, Hi, Sq, Di], all keys [B, 1, Sk, Di]."""

    queries: Tensor
    keys: Tensor


class _Registered(NamedTuple):
    """What `register` replaced."""

    modeling: ModuleType
    forward: Callable[..., Any]


_registered: _Registered | None = None


class Registration:
    """Answer of `register`; a ``with`` block undoes at its end what that call did.

    ``fresh`` says whether it registered, or found that done.
    """

    def __init__(self, fresh: bool) -> None:
        self._fresh = fresh

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fresh:
            unregister()
            self._fresh = False


def register() -> Registration:
    """Make ``attn_implementation="msa_tiles"`` known to transformers, for MiniMax-M3's text models.

    Models of other implementations stay as they are. Calling it again changes nothing. `unregister` takes it back, and
    so does the end of ``with register():``. Raises ``ImportError`` where transformers, or its MiniMax-M3, is not there,
    or has an indexer that is called in another way than that of transformers 5.24.
    """
    global _registered
    if _registered is not None:
        return Registration(fresh=False)
    modeling = _modeling()
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    indexer = modeling.MiniMaxM3VLIndexer
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, slots_of)
    _registered = _Registered(modeling, indexer.forward)
    indexer.forward = _indexer_forward(modeling, indexer.forward)
    return Registration(fresh=True)


def unregister() -> None:
    """Take `register` back; without one it does nothing."""
    global _registered
    if _registered is None:
        return
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    _registered.modeling.MiniMaxM3VLIndexer.forward = _registered.forward  # type: ignore[attr-defined]
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)
    _registered = None


def _modeling() -> ModuleType:
    """transformers' module of MiniMax-M3, which has the classes and signatures that this file builds on."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("register needs transformers, which is not installed: `pip install transformers`") from error
    found = f"transformers {transformers.__version__}"
    try:
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
    except ImportError as error:
        raise ImportError(f"{found} has no models.minimax_m3_vl: `pip install 'transformers>=5.24'`") from error
    parameters = tuple(inspect.signature(modeling.MiniMaxM3VLIndexer.forward).parameters)[1:]
    if parameters != _PARAMETERS:
        wanted = ", ".join(_PARAMETERS)
        raise ImportError(f"the indexer of {found} takes ({', '.join(parameters)}); wanted ({wanted}), as in 5.24")
    return modeling


def _indexer_forward(modeling: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an indexer: up to the cache as it was, and what follows is attention's, which knows padding."""
    rotate = modeling.apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor
    ) -> Any:
        if self.config._attn_implementation != NAME:
            return original(self, hidden_states, position_embeddings, cache, position_ids)
        # Nothing here has a gradient: a selection has none.
        with torch.no_grad():
            queries = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
            keys = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (1, self.head_dim))).transpose(1, 2)
            cos, sin = (part[..., : self.head_dim] for part in position_embeddings)
            queries, keys = rotate(queries, keys, cos, sin)
            if cache is not None:
                keys = cache.layers[self.layer_idx].update_index(keys)
        return Indexed(queries, keys)

    return forward


def slots_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> Slots:
    """What transformers asks in place of a mask: which slots of a row hold tokens. See `Slots.of`."""
    if use_vmap or local_size is not None or kv_offset:
        raise ValueError(f"attn_implementation={NAME!r} attends causally to everything; this model wants another mask")
    return Slots.of(attention_mask, q_offset + q_length)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Slots | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    block_indices: Indexed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls: ``query`` [B, Hq, Sq, D], ``key``, ``value`` [B, Hkv, Sk, D].

    bfloat16, float32 or float64 (CUDA: bfloat16). Returns out [B, Sq, Hq, D] and None for the weights, which are never
    made. Under ``torch.autocast`` they are cast. Queries of padding have any finite value. Attention that is not causal
    (the vision tower's) is transformers' own ``sdpa``. Raises ``ValueError`` or ``TypeError`` with what to do instead
    for what it does not serve: dropout, prepared 4D masks, padding between tokens, packed sequences with a cache,
    float16, asking for weights.
    """
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mask: Any = attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    _refuse_what_is_not_served(query, dropout, kwargs)
    query, key, value = _autocast(query, key, value)
    slots = _slots(attention_mask, query, key, kwargs.get("position_ids"))
    packed = slots.sequences(query.shape, key.shape[2], module.training, kwargs)
    if block_indices is None:
        out = _attend_densely(query, key, value, scaling, slots, packed)
    else:
        out = _attend_sparsely(module.indexer, query, key, value, scaling, slots, packed, block_indices)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _refuse_what_is_not_served(query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"attention_dropout: got {dropout}; {NAME} has none: set config.attention_dropout = 0")
    if kwargs.get("output_attentions"):
        raise ValueError(f"output_attentions: got True; {NAME} makes no weights: load the model with 'eager' for them")
    if query.dtype == torch.float16:
        raise TypeError(f"query: got dtype torch.float16; {NAME} takes bfloat16: load the model in torch.bfloat16")


def _slots(given: Slots | Tensor | None, query: Tensor, key: Tensor, position_ids: Tensor | None) -> Slots:
    """Where tokens are; a layer that is called by itself, without a mask, has no padding."""
    if isinstance(given, Slots):
        return given
    if given is not None:
        came = f"shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"attention_mask: got {came}; {NAME} takes a 2D mask [B, Sk], 1 for tokens and 0 for padding")
    if position_ids is None or query.shape[2] == key.shape[2]:
        return Slots(None, key.shape[2])
    # A static cache hands out its whole buffer: the last position says how much of it is in use.
    return Slots(None, (position_ids.view(-1, position_ids.shape[-1])[:, -1] + 1).to(torch.int32))


def _attend_densely(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, slots: Slots, packed: dict[str, Any] | None
) -> Tensor:
    """out [B * Sq, Hq, D] over everything before a query."""
    if packed is not None:
        q, k, v = (heads_first.rows(each) for each in (query, key, value))
        return _one(ops.dense_attention(q, k, v, softmax_scale=scaling, **packed))
    keys, values = _alike(key, value)
    placed = slots.place(query.shape[2], keys, used=False)
    q = heads_first.rows(query)
    return _one(ops.dense_attention(q, keys.packed, values.packed, softmax_scale=scaling, **placed))


def _attend_sparsely(
    indexer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    slots: Slots,
    packed: dict[str, Any] | None,
    indexed: Indexed,
) -> Tensor:
    """out [B * Sq, Hq, D] over the blocks that the indexer selects."""
    indexed = Indexed(*_autocast(*indexed))
    idx_q, q = heads_first.rows(indexed.queries), heads_first.rows(query)
    options: dict[str, Any] = {"block_size": indexer.block_size, "softmax_scale": scaling}
    if packed is not None:
        idx_k, k, v = (heads_first.rows(each) for each in (indexed.keys, key, value))
        ids = _select(indexer, idx_q, idx_k[:, 0], key.shape[1], False, packed)
        return _one(ops.sparse_attention(q, k, v, ids, **options, **packed))
    num_queries = query.shape[2]
    few = num_queries <= FEW_QUERIES and not (torch.is_grad_enabled() and query.requires_grad)
    index_keys = heads_first.tokens(indexed.keys)
    placed = slots.place(num_queries, index_keys)
    ids = _select(indexer, idx_q, index_keys.packed[:, 0], key.shape[1], few, placed)
    keys, values = _alike(key, value)
    placed = slots.place(num_queries, keys)
    attend = ops.sparse_decode if few else ops.sparse_attention
    return _one(attend(q, keys.packed, values.packed, ids, **options, **placed))


def _select(indexer: Any, idx_q: Tensor, idx_k: Tensor, num_kv_heads: int, few: bool, where: dict[str, Any]) -> Tensor:
    """int32 [Hkv, T, topk]. An index head serves as many KV heads as there are for each."""
    num_heads = idx_q.shape[1]
    if num_kv_heads % num_heads:
        raise ValueError(
            f"index_n_heads: got {num_heads}; {NAME} takes the {num_kv_heads} of num_key_value_heads, or a divisor: "
            "query heads of one KV head share a selection"
        )
    choice: dict[str, Any] = {"block_size": indexer.block_size, "local_blocks": indexer.local_blocks, **where}
    if few:
        score = ops.decode_score(idx_q, idx_k, block_size=indexer.block_size, **where)
        ids = ops.decode_topk(score, indexer.topk_blocks, **choice)
    else:
        ids = ops.select_blocks(idx_q, idx_k, indexer.topk_blocks, **choice)
    return ids if num_heads == num_kv_heads else ids.repeat_interleave(num_kv_heads // num_heads, dim=0)


def _alike(key: Tensor, value: Tensor) -> tuple[heads_first.Tokens, heads_first.Tokens]:
    """Keys and values as tokens with one pitch."""
    keys, values = heads_first.tokens(key), heads_first.tokens(value)
    return (keys, values) if keys.pitch == values.pitch else (heads_first.copied(key), heads_first.copied(value))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In autocast's dtype where it is on: rotated queries and keys are wider than values there."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)


def _one(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The answer of a call that asked for no LSE."""
    return result if isinstance(result, Tensor) else result[0]
