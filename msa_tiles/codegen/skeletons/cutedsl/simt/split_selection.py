"""Divides a block selection into what neighbouring queries share and the rest.

Grid: (WARPS tiles, KV head); a warp takes a tile, tile_tokens neighbouring queries. No warp waits for another one.

A tile's entries are its tile_tokens * topk ids, named by the row where their block begins (-1: absent or not visible),
so that blocks of different requests never meet. Entries of one block belong to the first of them, which counts the
queries that select the block and ranks it: more queries first, then in the order of the entries. An id that its query
has in an earlier slot is a twin, which counts for nothing. Shared are the blocks that at least three quarters of the
tile's queries select, and beyond them the best ones until a tile has `fill`; a block's rank is its place in the list.
What no shared block owns is moved to the front of its row of `rest`. Places come from votes: a lane counts the lanes
below it that have something to write too. Where rows are short, a warp reads and writes several queries at a time.

Shared memory, for every warp: three int32 for each entry, [tile_tokens * 64] each, namely its row, what ranks it, and
its owner; three int32 for each query, [tile_tokens] each: the first row and the length of its request and the last key
that it sees.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.shared import make_buffers
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.varlen import key_length, last_at_most, last_visible
from msa_tiles.dsl.cutedsl.warp import ballot, bits_below, count_bits, first_bit
from msa_tiles.dsl.table import WARP, Role, Table, buffer, declares
from msa_tiles.dsl.words import CUT, VALID_SHIFT

WARPS = 4  # <- tile.warps
LONGEST = 64  # entries of a query
BATCH = 2  # entries of a lane that share what they are compared with
# Fields of a listed block's second word, and of an owner. A mark is number of queries << 8 | mask of them.
COUNT_SHIFT = 8
ENTRY, TWIN, SHARED = (1 << 16) - 1, 1 << 16, 1 << 17


def split_selection(block_size: int, tile_tokens: int):
    """Build the kernel for one block size and number of queries per tile.

    block_indices [num_kv_heads, total_q, topk] in any order with -1 anywhere; ids of blocks that the query cannot see
    are dropped. Writes rest [num_kv_heads, total_q, topk], ids in the order of the selection, then -1, with their
    number in rest_counts [num_kv_heads, total_q]; shared [num_kv_heads, tiles, capacity, 2], pairs (row where the block
    begins, valid rows << 9 | whether a query of the tile sees less than the block << 8 | mask of the queries that
    select it), with their number in shared_counts [num_kv_heads, tiles]; last_rows [total_q], the row of the last key
    that a query sees, -1 for none. All are int32. tile_tokens is at most 8.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SplitSelection(block_size, tile_tokens)
    return kernel, kernel.arguments()


class Lengths(NamedTuple):
    """Where queries and keys stand."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    q_positions: Any
    use_seqused: Any
    use_positions: Any


class Tile(NamedTuple):
    """A warp's queries and its share of shared memory."""

    first_token: Any
    tokens: Any  # queries that exist
    topk: Any
    lane: Any
    abreast: Any  # queries that the warp takes at a time, a lane for each slot: one where topk is more than half a warp
    beside: Any  # which of them is the lane's; abreast or more for lanes that are left over
    slot: Any  # the lane's slot of its query, which is the first of two in rows longer than a warp
    fellows: Any  # the lanes of its query
    rows: Any  # of each entry: the row where its block begins, or -1
    marks: Any  # of each entry that owns: number of queries << 8 | mask of them; 0 of others
    owners: Any  # of each entry: first entry of its block | TWIN | SHARED, or -1
    starts: Any  # of each query: the first row of its request
    limits: Any  # of each query: the last key that it sees
    lengths: Any  # of each query: the keys of its request


@declares
def cta(block_size, tile_tokens):
    """What a thread block is made of."""
    entries = {"entries": LONGEST * tile_tokens, "warps": WARPS}
    queries = {"queries": tile_tokens, "warps": WARPS}
    return Table(
        roles=(Role("all", WARPS, "a tile each; none waits for another"),),
        pipelines=(),
        buffers=(
            buffer("rows", "int32", note="where an entry's block begins, or -1", **entries),
            buffer("marks", "int32", note="number of queries << 8 | mask of them; 0 of others", **entries),
            buffer("owners", "int32", note="first entry of an entry's block | TWIN | SHARED, or -1", **entries),
            buffer("starts", "int32", note="the first row of a query's request", **queries),
            buffer("limits", "int32", note="the last key that a query sees", **queries),
            buffer("lengths", "int32", note="the keys of a query's request", **queries),
        ),
    )


class SplitSelection:
    """
    # <- cta
    """

    def __init__(self, block_size, tile_tokens):
        self.cta = cta(block_size, tile_tokens)
        self.block_size = block_size
        self.tile_tokens = tile_tokens

    def arguments(self):
        """Stand-ins for cute.compile: 10 tensors, 3 scalars and the stream."""
        heads, total_q, topk, starts, tiles = (cute.sym_int() for _ in range(5))

        return (
            stand_in(Int32, heads, total_q, topk, last=cute.sym_int64()),
            stand_in(Int32, starts),
            stand_in(Int32, starts),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, heads, total_q, topk),
            stand_in(Int32, heads, total_q),
            stand_in(Int32, heads, tiles, cute.sym_int(), 2),
            stand_in(Int32, heads, tiles),
            stand_in(Int32, total_q),
            *(Int32(0) for _ in range(3)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, block_indices: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, rest: cute.Tensor, rest_counts: cute.Tensor, shared: cute.Tensor,
        shared_counts: cute.Tensor, last_rows: cute.Tensor, use_seqused: Int32, use_positions: Int32, fill: Int32,
        stream,
    ):  # fmt: skip
        """Launch. An absent tensor is any other of its rank and type."""
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions)
        self.kernel(block_indices, lengths, rest, rest_counts, shared, shared_counts, last_rows, fill).launch(
            grid=(cute.ceil_div(shared.shape[1], WARPS), shared.shape[0], 1),
            block=(self.cta.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, block_indices: cute.Tensor, lengths: Lengths, rest: cute.Tensor, rest_counts: cute.Tensor,
        shared: cute.Tensor, shared_counts: cute.Tensor, last_rows: cute.Tensor, fill: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        tile_group, head, _ = cute.arch.block_idx()
        found = make_buffers(self.cta, SmemAllocator(), {})
        rows, marks, owners, starts, limits, key_lengths = (found[name] for name in self.cta.buffers)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_index = tile_group * WARPS + warp
        first_token = tile_index * self.tile_tokens
        lane, topk = thread % WARP, Int32(rest.shape[2])
        slots = cutlass.max(cutlass.min(topk, WARP), 1)
        beside = lane // slots
        tile = Tile(
            first_token, cutlass.min(self.tile_tokens, Int32(rest.shape[1]) - first_token), topk, lane,
            WARP // slots, beside, lane - beside * slots, bits_below(slots) << (beside * slots), rows[None, warp],
            marks[None, warp], owners[None, warp], starts[None, warp], limits[None, warp], key_lengths[None, warp],
        )  # fmt: skip
        if tile_index < shared.shape[1]:
            self.stand(tile, lengths, head, last_rows)
            cute.arch.sync_warp()
            self.read_rows(tile, block_indices, head)
            cute.arch.sync_warp()
            self.find_owners(tile)
            # A lane lists, and flags, entries whose marks and owners it wrote itself: no barrier in between.
            listed = self.list_shared(tile, shared[head, tile_index, None, None], fill)
            if tile.lane == 0:
                shared_counts[head, tile_index] = listed
            # A query's entries have owners of other lanes, and votes do not order what was written.
            cute.arch.sync_warp()
            self.write_rest(tile, rest, rest_counts, head)

    @cute.jit
    def stand(self, tile: Tile, lengths: Lengths, head: Int32, last_rows: cute.Tensor):
        """Where the tile's queries stand, a lane for each; queries past the last request belong to nobody."""
        requests = Int32(cute.size(lengths.cu_seqlens_q)) - 1
        if tile.lane < self.tile_tokens:
            token = tile.first_token + tile.lane
            start, limit, length = Int32(0), Int32(-1), Int32(0)
            if (tile.lane < tile.tokens) & (token < lengths.cu_seqlens_q[requests]):
                request = last_at_most(lengths.cu_seqlens_q, token)
                start = lengths.cu_seqlens_k[request]
                length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
                end = lengths.cu_seqlens_q[request + 1]
                limit = last_visible(lengths.q_positions, lengths.use_positions, token, end, length, length)
            tile.starts[tile.lane] = start
            tile.limits[tile.lane] = limit
            tile.lengths[tile.lane] = length
            if (head == 0) & (tile.lane < tile.tokens):
                last_rows[token] = pick(limit >= 0, start + limit, -1)

    @cute.jit
    def read_rows(self, tile: Tile, block_indices: cute.Tensor, head: Int32):
        """The row of each entry, that of absent queries too."""
        for first in cutlass.range(0, self.tile_tokens, tile.abreast, unroll=1):
            token = first + tile.beside
            if (tile.beside < tile.abreast) & (token < self.tile_tokens):
                start, limit = tile.starts[token], tile.limits[token]
                slot = tile.slot
                while slot < tile.topk:
                    block = Int32(-1)
                    if token < tile.tokens:
                        block = block_indices[head, tile.first_token + token, slot]
                    row = Int32(-1)
                    # Compare before multiplying: a wild id must not overflow into a visible one.
                    if (block >= 0) & (limit >= 0) & (block <= limit // self.block_size):
                        row = start + block * self.block_size
                    tile.rows[token * tile.topk + slot] = row
                    slot = slot + WARP

    @cute.jit
    def find_owners(self, tile: Tile):
        """Owner and mark of each entry."""
        entries = self.tile_tokens * tile.topk
        own, mask, owner, twin, hit = (cute.make_rmem_tensor(BATCH, Int32) for _ in range(5))
        for batch in cutlass.range((entries + BATCH * WARP - 1) // (BATCH * WARP), unroll=1):
            first = batch * (BATCH * WARP) + tile.lane
            for c in cutlass.range_constexpr(BATCH):
                own[c] = Int32(-1)
                if first + c * WARP < entries:
                    own[c] = tile.rows[first + c * WARP]
                mask[c] = Int32(0)
                owner[c] = entries
                twin[c] = Int32(0)
            for token in cutlass.range_constexpr(self.tile_tokens):
                last = (token + 1) * tile.topk - 1
                hit.fill(-1)
                # From the last slot to the first, so that the first of equal ids stays.
                for slot in cutlass.range(tile.topk, unroll=4):
                    row = tile.rows[last - slot]
                    for c in cutlass.range_constexpr(BATCH):
                        hit[c] = pick(row == own[c], last - slot, hit[c])
                for c in cutlass.range_constexpr(BATCH):
                    entry = first + c * WARP
                    found = hit[c] >= 0
                    mask[c] = pick(found, (mask[c] + (1 << COUNT_SHIFT)) | (1 << token), mask[c])
                    owner[c] = pick(found, cutlass.min(owner[c], hit[c]), owner[c])
                    twin[c] = pick(found & (hit[c] < entry) & (entry <= last), TWIN, twin[c])
            for c in cutlass.range_constexpr(BATCH):
                entry = first + c * WARP
                if entry < entries:
                    tile.marks[entry] = pick((own[c] >= 0) & (owner[c] == entry), mask[c], 0)
                    tile.owners[entry] = pick(own[c] >= 0, owner[c] | twin[c], -1)

    @cute.jit
    def list_shared(self, tile: Tile, listing: cute.Tensor, fill: Int32) -> Int32:
        """Write the shared blocks [capacity, 2] and flag the entries that own them; how many they are.

        Blocks that all queries select come first, then those that all but one select, and so on.
        """
        capacity = Int32(listing.shape[0])
        entries = self.tile_tokens * tile.topk
        # Three quarters, rounded up.
        enough = tile.tokens - tile.tokens // 4
        listed = Int32(0)
        for less in cutlass.range(self.tile_tokens, unroll=1):
            count = self.tile_tokens - less
            most = pick(count >= enough, capacity, cutlass.min(fill, capacity))
            if listed < most:
                for chunk in cutlass.range((entries + WARP - 1) // WARP, unroll=1):
                    entry = chunk * WARP + tile.lane
                    mark = Int32(0)
                    if entry < entries:
                        mark = tile.marks[entry]
                    taken = (mark >> COUNT_SHIFT) == count
                    takers = ballot(taken)
                    rank = listed + count_bits(takers & bits_below(tile.lane))
                    if taken & (rank < most):
                        row = tile.rows[entry]
                        word = mark & ((1 << COUNT_SHIFT) - 1)
                        listing[rank, 0] = row
                        listing[rank, 1] = word | self.facts(tile, row, word)
                        tile.owners[entry] = entry | SHARED
                    listed = cutlass.min(listed + count_bits(takers), most)
        return listed

    @cute.jit
    def facts(self, tile: Tile, row: Int32, mask: Int32) -> Int32:
        """Valid rows << 9 | whether a query of the tile sees less than the block << 8, for a block's row.

        mask tells the queries that select the block, which are of one request.
        """
        cut = mask != (Int32(1) << tile.tokens) - 1
        for t in cutlass.range_constexpr(self.tile_tokens):
            visible = tile.starts[t] + tile.limits[t] - row
            cut = cut | ((((mask >> t) & 1) != 0) & (visible < self.block_size - 1))
        token = first_bit(mask)
        valid = cutlass.min(tile.starts[token] + tile.lengths[token] - row, self.block_size)
        return pick(cut, CUT, 0) | (valid << VALID_SHIFT)

    @cute.jit
    def write_rest(self, tile: Tile, rest: cute.Tensor, rest_counts: cute.Tensor, head: Int32):
        """The ids that no shared block took, then -1, and their number."""
        for first in cutlass.range(0, tile.tokens, tile.abreast, unroll=1):
            token = first + tile.beside
            query = tile.first_token + token
            mine = (tile.beside < tile.abreast) & (token < tile.tokens)
            number = Int32(0)
            for step in cutlass.range((tile.topk + WARP - 1) // WARP, unroll=1):
                slot = step * WARP + tile.slot
                entry = token * tile.topk + slot
                kept = Boolean(False)
                if mine & (slot < tile.topk):
                    owner = tile.owners[entry]
                    if (owner >= 0) & ((owner & TWIN) == 0):
                        kept = (tile.owners[owner & ENTRY] & SHARED) == 0
                keepers = ballot(kept) & tile.fellows
                if kept:
                    place = number + count_bits(keepers & bits_below(tile.lane))
                    rest[head, query, place] = (tile.rows[entry] - tile.starts[token]) // self.block_size
                number = number + count_bits(keepers)
            if mine:
                slot = number + tile.slot
                while slot < tile.topk:
                    rest[head, query, slot] = Int32(-1)
                    slot = slot + WARP
                if tile.slot == 0:
                    rest_counts[head, query] = number
