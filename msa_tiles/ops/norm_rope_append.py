"""norm_rope_append: norm and rotate queries and keys, and write keys and values into paged caches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import norm_rope as calls
from msa_tiles.call.norm_rope import Buffers, NormRope
from msa_tiles.launch import norm_rope
from msa_tiles.library import registration, remember
from msa_tiles.quant import QuantizedTensor


def norm_rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor | QuantizedTensor,
    v_cache: Tensor | QuantizedTensor,
    slot_mapping: Tensor,
    *,
    idx_q: Tensor | None = None,
    idx_k: Tensor | None = None,
    idx_q_weight: Tensor | None = None,
    idx_k_weight: Tensor | None = None,
    index_cache: Tensor | QuantizedTensor | None = None,
    index_slot_mapping: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    q_out: Tensor | None = None,
    idx_out: Tensor | None = None,
    format: str | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    index_cache_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """What stands between a layer's projections and its attention, in one launch.

    Each row of ``q``, ``k``, ``idx_q`` and ``idx_k`` is divided by the root of (its mean square + ``eps``), multiplied
    by (its weight + ``weight_offset``), and rotated. Queries are written to ``q_out`` and ``idx_out``, or in place;
    keys and the values, which stay as they are, go into their slots as `append_kv` and `append_index` would write them.
    All of it is float32 and rounded once, to what is stored: keys are not rounded to bfloat16 on their way to a
    quantised cache.

    ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D], bfloat16 (on the reference also float32), of any strides but a unit
    last one: slices of one projection's output, as a rule. ``q_weight``, ``k_weight`` [D], of the same dtype.
    ``weight_offset`` is 0, or 1 where a model keeps weights less 1, as MiniMax M3 does. ``cos_sin`` [positions,
    rotary_dim], bfloat16 or float32: of a position the cosines for columns i and i + rotary_dim / 2 of a row, and
    behind them their sines; the columns from rotary_dim on stay as they are. Kernels want a rotary_dim that is a
    multiple of 16. ``positions`` int64 or int32 [T]; a token whose position the table has not is not rotated.

    ``k_cache``, ``v_cache``, their scales, ``slot_mapping`` and ``format`` are those of `append_kv`. The queries of a
    token whose slot is negative, or not in the cache, are written all the same.

    The index branch is there as a whole or, in dense layers, not at all: ``idx_q`` [T, Hi, D], ``idx_k`` [T, D],
    ``idx_q_weight``, ``idx_k_weight``, and ``index_cache`` with ``index_cache_scale``, what `append_index` calls
    ``scale``; its slots are ``index_slot_mapping`` where that differs from ``slot_mapping``. ``idx_out`` may be
    torch.float8_e4m3fn, for queries without a scale: what exceeds its range becomes its largest number. Kernels have
    index caches of the format of ``k_cache``, with scales of the same kind (given or computed), or of bfloat16.

    The arithmetic is that of MiniMax M3 in transformers (`MiniMaxM3VLRMSNorm`, `apply_rotary_pos_emb`), where results
    are rounded after the norm, too. vLLM has an operator for this, `fused_minimax_m3_qknorm_rope_kv_insert`, which
    also writes the new k and idx_k back.

    Nothing is allocated and nothing synchronises; a captured graph serves other rows, positions and slots at the same
    addresses. No gradient passes.
    """
    caches, scales = (k_cache, v_cache, index_cache), (k_scale, v_scale, index_cache_scale)
    index = (idx_q, idx_k, idx_q_weight, idx_k_weight, index_slot_mapping, idx_out)
    known = remember.signature(
        (q, k, v, q_weight, k_weight, cos_sin, positions, slot_mapping, q_out, *index, *caches, *scales),
        (format, eps, weight_offset, q_out is q, idx_out is idx_q, backend),
    )
    launch = _SEEN.get(known)
    if launch is not None:
        apart, idx_apart = q_out is not None and q_out is not q, idx_out is not None and idx_out is not idx_q
        call = NormRope(
            q if apart else None, k, v, idx_q if idx_apart else None, idx_k, q_weight, k_weight, idx_q_weight,
            idx_k_weight, cos_sin, positions, slot_mapping, index_slot_mapping, None, None, None, float(eps),
            float(weight_offset), backend,
        )  # fmt: skip
        into = (q if q_out is None else q_out, idx_q if idx_out is None else idx_out)
        registration.written(launch(call, *into, caches, scales))
        return
    call, written = calls.norm_rope_append(
        q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, eps=eps,
        weight_offset=weight_offset, q_out=q_out, format=format, k_scale=k_scale, v_scale=v_scale, backend=backend,
        idx_q=idx_q, idx_k=idx_k, idx_q_weight=idx_q_weight, idx_k_weight=idx_k_weight, index_cache=index_cache,
        index_slot_mapping=index_slot_mapping, idx_out=idx_out, index_cache_scale=index_cache_scale,
    )  # fmt: skip
    _OPERATOR.mutating(call, *written.buffers)
    if known is not None and isinstance(k_cache, Tensor):
        pools = k_cache.dim() == k.dim(), isinstance(index_cache, Tensor) and index_cache.dim() == 2
        _SEEN.keep(known, norm_rope.prepare(call, written, pools))


def _by_reference(call: NormRope, *buffers: Any) -> None:
    """The same in plain torch."""
    into = Buffers(*buffers)
    named = call._asdict() | into._asdict()
    del named["backend"]
    named["q"] = into.q_out if call.q is None else call.q
    named["idx_q"] = into.idx_out if call.idx_q is None else call.idx_q
    reference.norm_rope_append(**named)


_SEEN: remember.Remembered[norm_rope.Launch] = remember.Remembered()
_OPERATOR: registration.Operator[NormRope] = registration.define_in_place(
    "norm_rope_append",
    NormRope,
    Buffers._fields,
    optional=("idx_out", "index_cache", "k_scales", "v_scales", "index_scales"),
    reference=_by_reference,
    kernels=norm_rope.run,
)
