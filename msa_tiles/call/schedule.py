"""A schedule: the reverse index of a selection, as a caller holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.where import Where


class WindowSchedule(NamedTuple):
    """The tensors of a schedule, and the queries of its windows."""

    edges: Tensor
    tasks: Tensor
    counts: Tensor
    window: int


@dataclass(frozen=True)
class Schedule:
    """Which queries read each KV block, per window of queries and KV head; made once, used by several calls.

    The tensors are int32: ``edges`` [windows, Hkv, window * topk] holds (query, slot) pairs grouped by block with the
    queries ascending, ``tasks`` [windows, Hkv, most tasks, 4] cuts them into pieces of work and ``counts``
    [windows, Hkv, …] tells how many there are. How an edge and a task are encoded is a matter between the builder and
    the attention of one device: on the CPU as `msa_tiles.reference.build_schedule` says (one window), on CUDA as the
    generated kernels say. ``window`` is the number of queries of a window, ``total_q`` that of all, ``topk`` and
    ``block_size`` are those of the selection. ``max_pages`` is the width of the page table in which the rows of keys
    were counted, 0 for flat keys; ``sharded`` tells whether they were counted from a ``k_offset``, ``counted`` whether
    key lengths were given: without, every request was taken to have as many keys as queries.
    """

    edges: Tensor
    tasks: Tensor
    counts: Tensor
    window: int
    topk: int
    block_size: int
    total_q: int
    max_pages: int = 0
    sharded: bool = False
    counted: bool = True

    @property
    def num_kv_heads(self) -> int:
        return self.edges.shape[1]

    def validate(self, block_indices: Tensor, block_size: int, where: Where, total_k: int) -> None:
        """Refuse a schedule that was made for other ids, keys or pages than these, as far as shapes tell.

        Ids, lengths and positions lie on the device: calls compare them with ``check=True`` alone.

        ``total_k`` is the number of rows of flat keys.
        """
        num_kv_heads, total_q, topk = block_indices.shape
        validate.same_device("schedule", self.edges, block_indices, "block_indices")
        made = (self.num_kv_heads, self.total_q, self.topk, self.block_size)
        if made != (num_kv_heads, total_q, topk, block_size):
            names = "KV heads, {} queries, topk {}, block_size {}"
            validate.refuse(
                "schedule",
                f"one for {{}} {names}".format(*made),
                f"{{}} {names}".format(num_kv_heads, total_q, topk, block_size),
            )

        max_pages = 0 if where.page_table is None else where.page_table.shape[1]
        if self.max_pages != max_pages:
            validate.refuse("schedule", f"one for {_pages(self.max_pages)}", _pages(max_pages))
        if self.sharded != (where.k_offset is not None):
            how = "with" if self.sharded else "without"
            validate.refuse("schedule", f"one made {how} k_offset", "one made of the arguments of this call")
        if not self.counted and max_pages == 0 and total_k != total_q:
            came = f"one made without key lengths, for as many keys as queries ({total_q})"
            validate.refuse("schedule", came, f"one made with cu_seqlens_k or seqused_k for the {total_k} keys")


def _pages(max_pages: int) -> str:
    return f"a page_table of {max_pages} columns" if max_pages else "flat keys"


def of_call(
    schedule: Schedule | None, block_indices: Tensor, block_size: int, where: Where, total_k: int
) -> WindowSchedule | None:
    """A schedule as a call holds it, checked against the rest of the call."""
    if schedule is None:
        return None
    if not isinstance(schedule, Schedule):
        validate.refuse_type("schedule", type(schedule).__name__, "a Schedule of build_schedule, or None")
    schedule.validate(block_indices, block_size, where, total_k)
    return WindowSchedule(schedule.edges, schedule.tasks, schedule.counts, schedule.window)


class ScheduleCall(NamedTuple):
    """A validated call of build_schedule."""

    block_indices: Tensor
    where: Where
    block_size: int
    window: int
    backend: str

    @property
    def device(self) -> torch.device:
        return self.block_indices.device
