"""How many queries and keys each request of a call has, as far as its tensors tell without being on a device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from msa_tiles.quant import QuantizedTensor


def sequences_of(bound: Mapping[str, Any]) -> tuple[list[tuple[int, int]] | None, list[str]]:
    """(queries, keys) of each request of a call's arguments, and what was assumed; None where that cannot be said."""
    notes: list[str] = []
    places = ("q", 0), ("idx_q", 0), ("block_indices", 1), ("score", 1), ("partial_out", 1), ("slot_mapping", 0)
    total_q = _size(bound, places)
    if total_q is None:
        return None, notes
    starts_q, used = bound.get("cu_seqlens_q"), bound.get("seqused_k")
    table = bound.get("page_table")
    number = next(
        (len(value) - shift for value, shift in ((starts_q, 1), (used, 0), (table, 0)) if value is not None), 1
    )
    if number < 1:
        return None, notes
    queries = _lengths(starts_q, number, total_q, "queries", notes)
    if used is not None and _readable(used):
        keys = [int(length) for length in used.tolist()]
    elif table is not None:
        page = _keys(bound).shape[-2]
        held = table.shape[1] * page
        most = bound.get("max_seqlen_k")
        keys = [held if most is None else min(held, most)] * number
        notes.append("Key lengths are not known here: taken to be as long as max_seqlen_k and page_table allow.")
    elif _keys(bound) is None:
        keys = queries
    else:
        keys = _lengths(bound.get("cu_seqlens_k"), number, _keys(bound).shape[0], "keys", notes)
    return (list(zip(queries, keys, strict=True)) if len(queries) == len(keys) else None), notes


def _lengths(starts: Any, number: int, total: int, what: str, notes: list[str]) -> list[int]:
    if starts is None and number == 1:
        return [total]
    if starts is not None and _readable(starts):
        values = [int(start) for start in starts.tolist()]
        return [after - before for before, after in itertools.pairwise(values)]
    notes.append(f"Requests are taken to have equally many {what}: their lengths are not known here.")
    return [total // number + (index < total % number) for index in range(number)]


def _readable(value: Tensor) -> bool:
    """Whether there are values, and reading them waits for no device."""
    return value.device.type == "cpu"


def _keys(bound: Mapping[str, Any]) -> Any:
    value = bound.get("k", bound.get("idx_k"))
    return value.data if isinstance(value, QuantizedTensor) else value


def _size(bound: Mapping[str, Any], places: tuple[tuple[str, int], ...]) -> int | None:
    for name, axis in places:
        value = bound.get(name)
        value = value.data if isinstance(value, QuantizedTensor) else value
        if isinstance(value, Tensor):
            return value.shape[axis]
    return None
