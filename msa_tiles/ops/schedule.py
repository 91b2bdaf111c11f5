"""build_schedule: the reverse index of a selection and the work list of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from msa_tiles import reference
from msa_tiles.ops import _contents, _dispatch, _library, _shard, _validate, _where
from msa_tiles.ops._where import Where


@dataclass(frozen=True)
class Schedule:
    """Which queries read each KV block, per window of queries and KV head; made once, used by several calls.

    The tensors are int32: ``edges`` [windows, Hkv, window * topk] holds (query, slot) pairs grouped by block with the
    queries ascending, ``tasks`` [windows, Hkv, most tasks, 4] cuts them into pieces of work and ``counts``
    [windows, Hkv, …] tells how many there are. How an edge and a task are encoded is a matter between the builder and
    the attention of one device: on the CPU as `msa_tiles.reference.build_schedule` says (one window), on CUDA as the
    generated kernels say. ``max_pages`` is the width of the page table in which the rows of keys were counted, 0 for
    flat keys; ``sharded`` tells whether they were counted from a ``k_offset``, ``counted`` whether key lengths were
    given: without, every request was taken to have as many keys as queries.
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

        ``total_k`` is the number of rows of flat keys.
        """
        num_kv_heads, total_q, topk = block_indices.shape
        _validate.same_device("schedule", self.edges, block_indices, "block_indices")
        made = (self.num_kv_heads, self.total_q, self.topk, self.block_size)
        if made != (num_kv_heads, total_q, topk, block_size):
            names = "KV heads, {} queries, topk {}, block_size {}"
            _validate.refuse(
                "schedule",
                f"one for {{}} {names}".format(*made),
                f"{{}} {names}".format(num_kv_heads, total_q, topk, block_size),
            )

        max_pages = 0 if where.page_table is None else where.page_table.shape[1]
        if self.max_pages != max_pages:
            _validate.refuse("schedule", f"one for {_pages(self.max_pages)}", _pages(max_pages))
        if self.sharded != (where.k_offset is not None):
            how = "with" if self.sharded else "without"
            _validate.refuse("schedule", f"one made {how} k_offset", "one made of the arguments of this call")
        if not self.counted and max_pages == 0 and total_k != total_q:
            came = f"one made without key lengths, for as many keys as queries ({total_q})"
            _validate.refuse("schedule", came, f"one made with cu_seqlens_k or seqused_k for the {total_k} keys")


def _pages(max_pages: int) -> str:
    return f"a page_table of {max_pages} columns" if max_pages else "flat keys"


def build_schedule(
    block_indices: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
) -> Schedule:
    """The reverse index of ``block_indices`` int32 [Hkv, T, k], for `sparse_attention` with the same lengths.

    Without key lengths a request has as many keys as queries: where one sequence has more keys, ``cu_seqlens_k``
    [0, Tk] tells. Ids that are negative, past the request's keys or past the query's position make no edge. Runs on
    the device of the ids.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    return build_on("auto", block_indices, where, block_size, check)


def build_on(backend: str, block_indices: Tensor, where: Where, block_size: int, check: bool = False) -> Schedule:
    """`build_schedule` by the kernel of one DSL; ``auto`` and ``reference`` are the reference for CPU tensors."""
    ids("block_indices", block_indices)
    _validate.integer("block_size", block_size, 1)
    _validate.backend(backend, block_indices.device)
    where.validate(block_indices.shape[1], block_indices, "block_indices", None, check)
    if check:
        _shard.check_offsets(where, block_size, backend, block_indices.device)
        _contents.check_block_indices(block_indices, where, block_size, None)
    _, total_q, topk = block_indices.shape
    window = total_q
    if block_indices.device.type == "cuda":
        window = _dispatch.attention_kernels().choose_window(block_indices)
    edges, tasks, counts = _OPERATOR.functional(block_indices, *where.arguments(), block_size, window, backend)
    max_pages = 0 if where.page_table is None else where.page_table.shape[1]
    sharded, counted = where.k_offset is not None, where.cu_seqlens_k is not None or where.seqused_k is not None
    return Schedule(edges, tasks, counts, window, topk, block_size, total_q, max_pages, sharded, counted)


def ids(name: str, value: Tensor) -> None:
    """Check block ids, int32 [Hkv, T, k]; their contents are nobody's promise."""
    _validate.tensor(name, value, "[Hkv, T, k]")
    _validate.int32(name, value, [None, None, None], "[Hkv, T, k]", value, name)


def _allocate(block_indices: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *place, block_size, window, _backend = rest
    where = Where(*place)
    num_kv_heads, total_q, topk = block_indices.shape
    if block_indices.device.type == "cuda":
        return _dispatch.attention_kernels().allocate_schedule(
            block_indices,
            num_requests=where.num_requests,
            max_seqlen_k=where.max_seqlen_k,
            block_size=block_size,
            window=window,
        )
    edges = block_indices.new_empty((1, num_kv_heads, total_q * topk))
    tasks = block_indices.new_empty((1, num_kv_heads, total_q * topk, 4))
    return edges, tasks, block_indices.new_empty((1, num_kv_heads, 2))


def _write(block_indices: Tensor, *rest: Any) -> None:
    *place, block_size, window, backend, edges, tasks, counts = rest
    where = Where(*place)
    if block_indices.device.type != "cuda":
        parts = reference.build_schedule(block_indices, block_size=block_size, **where.keywords())
        for destination, part in zip((edges, tasks, counts), parts, strict=True):
            destination.copy_(part)
        return
    variant = {"block_size": block_size}
    refusals = _dispatch.broken_rules("build_schedule", topk=block_indices.shape[2])
    refusals += _dispatch.oversized_table(where, block_size)
    # Paged keys matter to the attention kernel; the reverse index only names their rows.
    facts = _dispatch.call_facts(
        "build_schedule",
        where.without_pages(),
        block_indices.device,
        "bf16",
        variant,
        refusals=refusals,
        queries=block_indices.shape[1],
    )
    if block_indices.numel() == 0 or where.num_requests == 0 or where.max_seqlen_k == 0:
        counts.zero_()
        return
    _dispatch.attention_kernels().build_schedule(
        facts,
        block_indices,
        _dispatch.place(where, block_indices.shape[1], None, block_size, block_indices.device),
        block_size=block_size,
        window=window,
        edges=edges,
        tasks=tasks,
        counts=counts,
        backend=backend,
    )


_OPERATOR = _library.define(
    "build_schedule",
    f"Tensor block_indices, {_where.ARGUMENTS}, SymInt block_size, SymInt window, str backend",
    ("edges", "tasks", "counts"),
    _allocate,
    _shard.schedule(_write),
)
