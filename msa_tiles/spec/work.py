"""How much work a workload is: the quantities that rooflines are written in."""

from __future__ import annotations

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
    firsts = [(len_k - len_q + 1 if causal else len_k, len_q) for len_q, len_k in workload.sequences]
    known["visible_keys"] = sum(_sum_of_visible(first, len_q, causal) for first, len_q in firsts)
    if (block_size := dims.get("block_size")) is not None:
        runs = [run for first, len_q in firsts for run in _visible_block_counts(first, len_q, causal, block_size)]
        known["visible_blocks"] = sum(blocks * queries for blocks, queries in runs)
        if (topk := dims.get("topk")) is not None:
            known["selected_blocks"] = sum(min(blocks, topk) * queries for blocks, queries in runs)
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


def _visible_block_counts(first: int, queries: int, causal: bool, block_size: int) -> list[tuple[int, int]]:
    """(blocks seen, queries that see so many), in runs of equal counts."""
    if not causal:
        return [(-(-first // block_size), queries)]
    runs = []
    visible, last = max(first, 1), first + queries - 1
    while visible <= last:
        count = -(-visible // block_size)
        end = min(count * block_size, last)
        runs.append((count, end - visible + 1))
        visible = end + 1
    return runs


def describe(point: Mapping[str, int]) -> str:
    """`head_dim=128, block_size=64`, for messages."""
    return ", ".join(f"{name}={value}" for name, value in point.items()) or "no variant"
