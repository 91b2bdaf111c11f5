"""append_index: write index keys into a paged cache."""

from __future__ import annotations

from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import caches as calls
from msa_tiles.call.caches import IndexRows
from msa_tiles.launch import caches
from msa_tiles.library import registration, remember
from msa_tiles.quant import QuantizedTensor


def append_index(
    idx_k: Tensor,
    cache: Tensor | QuantizedTensor,
    slot_mapping: Tensor,
    *,
    format: str | None = None,
    scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write each token's index key into its slot of the cache, in place; as `append_kv` does with keys and values.

    ``idx_k`` [T, Di], bfloat16 or float32; ``cache`` [pages, page, Di], or a pool [slots, Di]; ``slot_mapping`` int64
    or int32 [T]. An e4m3 cache has one given ``scale``, float32 [], where None stands for 1, or one of every token,
    float32 [pages, page] (of a pool [slots]; any strides), which is computed and written beside the key. 4-bit caches
    as there.
    """
    known = remember.signature((idx_k, cache, slot_mapping, scale), (format, backend))
    launch = _SEEN.get(known)
    if launch is not None:
        launch((idx_k,), (cache,), slot_mapping, (scale,))
        registration.written(launch.written((cache,), (scale,)))
        return
    call, held = calls.append_index(idx_k, cache, slot_mapping, format=format, scale=scale, backend=backend)
    _OPERATOR.mutating(call, held.data, held.written)
    if known is not None and isinstance(cache, Tensor):
        _SEEN.keep(known, caches.prepare_index(call, held, cache.dim() == idx_k.dim()))


def _by_reference(call: IndexRows, cache: Tensor, scales: Tensor | None = None) -> None:
    """Fill the slots in plain torch."""
    reference.append_index(call.idx_k, cache, call.slot_mapping, scale=call.scale, scales=scales)


_SEEN: remember.Remembered[caches.Launch] = remember.Remembered()
_OPERATOR: registration.Operator[IndexRows] = registration.define_in_place(
    "append_index",
    IndexRows,
    ("cache", "scales"),
    optional=("scales",),
    reference=_by_reference,
    kernels=caches.run_index,
)
