"""append_kv: write keys and values into paged caches."""

from __future__ import annotations

from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import caches as calls
from msa_tiles.call.caches import Rows
from msa_tiles.launch import caches
from msa_tiles.library import registration, remember
from msa_tiles.quant import QuantizedTensor


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor | QuantizedTensor,
    v_cache: Tensor | QuantizedTensor,
    slot_mapping: Tensor,
    *,
    format: str | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write each token's keys and values into its slot of the caches, in place.

    ``k``, ``v`` [T, Hkv, D], bfloat16 or float32. ``k_cache``, ``v_cache`` [pages, Hkv, page, D], or pools
    [slots, Hkv, D], of any strides but a unit last one: token-major pages are a transposed view, and K beside V in one
    cache are two slices. ``slot_mapping`` int64 or int32 [T]: page * page size + place. A token whose slot is negative,
    or not in the cache, is skipped. Slots are distinct: where two tokens have one, it holds pieces of either.

    Caches are bfloat16 (on the reference also float32 and float64), or torch.float8_e4m3fn, with the scales that
    attention reads, ``k_scale`` and ``v_scale``, both of one kind. Given ones, float32 [] or [Hkv], are finite and
    above 0, which nobody checks, as they lie on the device: stored is value / scale, so that a scale of 0 leaves the
    largest number with the value's sign, and NaN for 0. Ones of each token and head, float32 [pages, Hkv, page] (of a
    pool [slots, Hkv]; any strides), are computed as `msa_tiles.quant.quantize_fp8` has it, and written beside the rows.
    Values are rounded once from what ``k`` and ``v`` hold, to nearest even, and what exceeds e4m3's range becomes its
    largest number; NaN stays NaN. ``format`` ("bf16" or "e4m3") names what a cache stores, which lets an e4m3 one come
    as bytes (torch.uint8).

    4-bit caches are a `QuantizedTensor` of nvfp4 or mxfp4 each, such as `msa_tiles.quant.vllm_pages` views, of linear
    or interleaved scales: those of groups are computed as `quantize_nvfp4` and `quantize_mxfp4` have it, and written;
    the global scale is given.

    Nothing is allocated and nothing synchronises; a captured graph serves other rows and slots at the same addresses.
    No gradient passes.
    """
    tensors, scales = (k, v, k_cache, v_cache, slot_mapping), (k_scale, v_scale)
    known = remember.signature((*tensors, *scales), (format, backend))
    launch = _SEEN.get(known)
    if launch is not None:
        launch((k, v), tensors[2:4], slot_mapping, scales)
        registration.written(launch.written(tensors[2:4], scales))
        return
    call, keys, values = calls.append_kv(
        k, v, k_cache, v_cache, slot_mapping, format=format, k_scale=k_scale, v_scale=v_scale, backend=backend
    )
    _OPERATOR.mutating(call, keys.data, values.data, keys.written, values.written)
    if known is not None and isinstance(k_cache, Tensor):
        _SEEN.keep(known, caches.prepare_kv(call, keys, values, k_cache.dim() == k.dim()))


def _by_reference(
    call: Rows, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None = None, v_scales: Tensor | None = None
) -> None:
    """Fill the slots in plain torch."""
    reference.append_kv(
        call.k,
        call.v,
        k_cache,
        v_cache,
        call.slot_mapping,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
        k_scales=k_scales,
        v_scales=v_scales,
    )


_SEEN: remember.Remembered[caches.Launch] = remember.Remembered()
_OPERATOR: registration.Operator[Rows] = registration.define_in_place(
    "append_kv",
    Rows,
    ("k_cache", "v_cache", "k_scales", "v_scales"),
    optional=("k_scales", "v_scales"),
    reference=_by_reference,
    kernels=caches.run_kv,
)
