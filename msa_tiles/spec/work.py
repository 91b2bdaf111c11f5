"""How much work a workload is: the quantities that rooflines are written in."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

from msa_tiles.spec.expression import Expression
from msa_tiles.spec.model import Device, Operator, Point, Precision, Workload

QUANTITIES = ("visible_keys", "visible_blocks", "selected_blocks", "element_bits", "query_bits", "output_bits")
_BITS = {"bfloat16": 16, "float32": 32}


def dims_of(operator: Operator, workload: Workload, point: Point) -> dict[str, int]:
    """Every dim of the operator for one workload at one compile-time point, derived dims included."""
    dims = {"total_q": sum(q for q, _ in workload.sequences), "total_k": sum(k for _, k in workload.sequences)}
    dims["num_sequences"] = len(workload.sequences)
    dims |= point
    dims |= workload.dims
    if "block_size" in dims:
        longest = max((k for _, k in workload.sequences), default=0)
        dims["max_blocks"] = -(-longest // dims["block_size"])
    pending = {name: value for name, value in operator.dims.items() if isinstance(value, Expression)}
    while pending:
        ready = [name for name, expression in pending.items() if expression.names <= dims.keys()]
        if not ready:
            raise KeyError(f"{operator.name}: no value for the dims that {', '.join(pending)} follow from")
        for name in ready:
            dims[name] = pending.pop(name).whole(dims)
    return dims


def quantities_of(operator: Operator, workload: Workload, precision: Precision, point: Point) -> dict[str, float]:
    """Dims, and sums over all queries: visible keys, blocks with a visible key, blocks a query may select.

    A query at position p of its request sees p + 1 keys, or every key of the request when the call is not causal.
    """
    dims = dims_of(operator, workload, point)
    known: dict[str, float] = {**dims}
    causal = workload.parameters.get("causal", True)
    # Sequences that are alike are counted, not summed up one by one.
    firsts = collections.Counter((len_k - len_q + 1 if causal else len_k, len_q) for len_q, len_k in workload.sequences)
    known["visible_keys"] = sum(_sum_of_visible(*each, causal) * times for each, times in firsts.items())
    if (block_size := dims.get("block_size")) is not None:

        def blocks(most: int) -> int:
            return sum(_sum_of_blocks(*each, causal, block_size, most) * times for each, times in firsts.items())

        known["visible_blocks"] = blocks(dims["total_k"])
        if (topk := dims.get("topk")) is not None:
            known["selected_blocks"] = blocks(topk)
    known["element_bits"] = precision.keys.bits_with_scales
    known["query_bits"] = precision.query.bits
    known["output_bits"] = _BITS[precision.output]
    return known


@dataclass(frozen=True)
class Work:
    """What a call has to do at least: operations on `compute` elements, bytes of memory to move."""

    flops: float
    bytes: float
    compute: str

    def floor_ms(self, device: Device) -> float:
        """The least time the roofline allows: arithmetic at peak or bytes at full bandwidth, whichever is longer.

        A device without a peak for `compute` is bounded by its bandwidth alone.
        """
        peak = device.peak_tflops.get(self.compute)
        arithmetic = self.flops / (peak * 1e12) if peak else 0.0
        return 1e3 * max(arithmetic, self.bytes / (device.memory_gb_per_s * 1e9))


def work_of(operator: Operator, workload: Workload, precision: Precision, point: Point, compute: str) -> Work:
    """The work of one workload, from the operator's roofline."""
    known = quantities_of(operator, workload, precision, point)
    return Work(operator.roofline.flops(known), operator.roofline.bytes(known), compute)


def floor_ms(
    operator: Operator, workload: Workload, precision: Precision, point: Point, device: Device, compute: str
) -> float:
    """`Work.floor_ms` of a workload."""
    return work_of(operator, workload, precision, point, compute).floor_ms(device)


def _sum_of_visible(first: int, queries: int, causal: bool) -> int:
    if not causal:
        return first * queries
    hidden = min(max(0, -first), queries)  # queries in front of the first key see nothing
    start, count = first + hidden, queries - hidden
    return count * start + count * (count - 1) // 2


def _sum_of_blocks(first: int, queries: int, causal: bool, block_size: int, most: int) -> int:
    """Blocks that hold visible keys, at most so many of each query."""
    if not causal:
        return min(-(-first // block_size), most) * queries

    def up_to(visible: int) -> int:
        """Of queries that see 1, 2, … keys."""
        full = min(visible // block_size, most)
        return block_size * full * (full + 1) // 2 + (visible - block_size * full) * min(full + 1, most)

    last = max(first + queries - 1, 0)
    return up_to(last) - up_to(min(max(first - 1, 0), last))


def describe(point: Mapping[str, int]) -> str:
    """`head_dim=128, block_size=64`, for messages."""
    return ", ".join(f"{name}={value}" for name, value in point.items()) or "no variant"
