"""Divides a block selection into what neighbouring queries share and the rest.

Grid: (WARPS tiles, KV head); a warp takes a tile, tile_tokens neighbouring queries. No warp waits for another one.

A tile's entries are its tile_tokens * topk ids, named by the row where their block begins (-1: absent, not visible, or
there twice in a row of ids), so that blocks of different requests never meet. Entries of one block belong to the first
of them, which counts the queries that select the block and ranks it: more queries first, then in the order of the
entries. Shared are the blocks that at least three quarters of the tile's queries select, and beyond them the best ones
until a tile has `fill`; a block's rank is its place in the list. What no shared block owns is moved to the front of its
row of `rest`. Places come from votes: a lane counts the lanes below it that have something to write too. Where rows are
short, a warp reads and writes several queries at a time.

# <- cta
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Role, Table, buffer, declares
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.shared import make_buffer
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_visible
from msa_tiles.dsl.tilelang.warp import ballot, bits_below, count_bits, first_bit

WARPS = 4  # <- tile.warps
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
LONGEST = 64
# Fields of a listed block's second word, and of an owner. A mark is number of queries << 8 | mask of them.
CUT, VALID_SHIFT = 1 << 8, 9
ENTRY, TWIN, SHARED = (1 << 16) - 1, 1 << 16, 1 << 17


@declares
def cta(block_size, tile_tokens):
    entries = tile_tokens * LONGEST
    return Table(
        roles=(Role("everybody", WARPS, "a tile each"),),
        pipelines=(),
        buffers=(
            buffer("rows", "int32", warps=WARPS, entries=entries, note="where its block begins"),
            buffer("marks", "int32", warps=WARPS, entries=entries, note="what ranks it"),
            buffer("owners", "int32", warps=WARPS, entries=entries),
            buffer("starts", "int32", warps=WARPS, queries=tile_tokens),
            buffer("limits", "int32", warps=WARPS, queries=tile_tokens),
            buffer("lengths", "int32", warps=WARPS, queries=tile_tokens),
        ),
        static=TILELANG,
    )


def split_selection(block_size: int, tile_tokens: int):
    """Build the kernel for one block size and number of queries per tile.

    block_indices [num_kv_heads, total_q, topk] in any order with -1 anywhere; ids of blocks that the query cannot see
    are dropped. Writes rest [num_kv_heads, total_q, topk], ids in the order of the selection, then -1, with their
    number in rest_counts [num_kv_heads, total_q]; shared [num_kv_heads, tiles, capacity, 2], pairs (row where the block
    begins, valid rows << 9 | whether a query of the tile sees less than the block << 8 | mask of the queries that
    select it), with their number in shared_counts [num_kv_heads, tiles]; last_rows [total_q], the row of the last key
    that a query sees, -1 for none. tile_tokens is at most 8.
    """
    table = cta(block_size, tile_tokens)
    num_kv_heads, total_q, topk, num_requests_1, num_requests = T.dynamic(
        "num_kv_heads, total_q, topk, num_requests_1, num_requests"
    )
    num_tiles, capacity = T.dynamic("num_tiles, capacity")
    num_positions = T.dynamic("num_positions")
    ids_head, ids_token, ids_slot = strides("ids_head, ids_token, ids_slot")

    @T.prim_func
    def main(
        block_indices: T.StridedTensor((num_kv_heads, total_q, topk), (ids_head, ids_token, ids_slot), "int32"),
        cu_seqlens_q: T.Tensor((num_requests_1,), "int32"),
        cu_seqlens_k: T.Tensor((num_requests_1,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        rest: T.Tensor((num_kv_heads, total_q, topk), "int32"),
        rest_counts: T.Tensor((num_kv_heads, total_q), "int32"),
        shared: T.Tensor((num_kv_heads, num_tiles, capacity, 2), "int32"),
        shared_counts: T.Tensor((num_kv_heads, num_tiles), "int32"),
        last_rows: T.Tensor((total_q,), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        fill: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tiles, WARPS), num_kv_heads, threads=table.threads) as (tile_group, head):
            rows = make_buffer(table, "rows")
            marks = make_buffer(table, "marks")
            owners = make_buffer(table, "owners")
            starts = make_buffer(table, "starts")
            limits = make_buffer(table, "limits")
            lengths = make_buffer(table, "lengths")
            request = T.alloc_local([1], "int32")
            start = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            length = T.alloc_var("int32")
            block = T.alloc_var("int32")
            row = T.alloc_var("int32")
            own = T.alloc_local([2], "int32")
            hit = T.alloc_local([2], "int32")
            mask = T.alloc_local([2], "int32")
            owner = T.alloc_local([2], "int32")
            twin = T.alloc_local([2], "int32")
            number = T.alloc_var("int32")
            mark = T.alloc_var("int32")
            rank = T.alloc_var("int32")
            takers = T.alloc_var("uint32")
            keepers = T.alloc_var("uint32")
            most = T.alloc_var("int32")
            ownership = T.alloc_var("int32")
            word = T.alloc_var("int32")
            listed = T.alloc_var("int32")
            kept = T.alloc_var("int32")
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            tile = tile_group * WARPS + warp
            requests = num_requests_1 - 1
            first_token = tile * tile_tokens
            tokens = T.min(tile_tokens, total_q - first_token)
            entries = tile_tokens * topk
            chunks = T.ceildiv(entries, 32)
            # Three quarters, rounded up.
            enough = tokens - tokens // 4
            # Queries that a warp takes at a time; which of them is the lane's, and its slot there.
            slots = T.max(T.min(topk, 32), 1)
            abreast = T.truncdiv(32, slots)
            beside = T.truncdiv(lane, slots)
            first_slot = lane - beside * slots
            fellows = bits_below(slots) << T.cast(beside * slots, "uint32")
            if tile < num_tiles:
                if lane < tile_tokens:
                    start = 0
                    limit = -1
                    length = 0
                    # Queries past the last request belong to nobody.
                    if lane < tokens and first_token + lane < cu_seqlens_q[requests]:
                        last_at_most(cu_seqlens_q, requests, first_token + lane, request)
                        start = cu_seqlens_k[request[0]]
                        length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                        end_token = cu_seqlens_q[request[0] + 1]
                        limit = last_visible(q_positions, use_positions, first_token + lane, end_token, length, length)
                    starts[warp, lane] = start
                    limits[warp, lane] = limit
                    lengths[warp, lane] = length
                    if head == 0 and lane < tokens:
                        last_rows[first_token + lane] = T.if_then_else(limit >= 0, start + limit, -1)
                T.sync_warp()
                for some in T.serial(T.ceildiv(tile_tokens, abreast)):
                    token = some * abreast + beside
                    if beside < abreast and token < tile_tokens:
                        start = starts[warp, token]
                        limit = limits[warp, token]
                        for step in T.serial(T.ceildiv(topk, 32)):
                            slot = step * 32 + first_slot
                            if slot < topk:
                                row = -1
                                if token < tokens:
                                    block = block_indices[head, first_token + token, slot]
                                    # Compare before multiplying: a wild id must not overflow into a visible one.
                                    if block >= 0 and limit >= 0 and block <= limit // block_size:
                                        row = start + block * block_size
                                rows[warp, token * topk + slot] = row
                T.sync_warp()
                # Two entries a lane at a time share what they are compared with.
                for pair in T.serial(T.ceildiv(entries, 64)):
                    for c in T.unroll(2):
                        own[c] = -1
                        if pair * 64 + c * 32 + lane < entries:
                            own[c] = rows[warp, pair * 64 + c * 32 + lane]
                        mask[c] = 0
                        owner[c] = entries
                        twin[c] = 0
                    for token in T.unroll(tile_tokens):
                        for c in T.unroll(2):
                            hit[c] = -1
                        # From the last slot to the first, so that the first of equal ids stays.
                        for slot in T.serial(topk):
                            row = rows[warp, token * topk + topk - 1 - slot]
                            for c in T.unroll(2):
                                if row == own[c]:
                                    hit[c] = token * topk + topk - 1 - slot
                        for c in T.unroll(2):
                            if hit[c] >= 0:
                                entry = pair * 64 + c * 32 + lane
                                mask[c] = (mask[c] + (1 << 8)) | (1 << token)
                                owner[c] = T.min(owner[c], hit[c])
                                if hit[c] < entry and entry < (token + 1) * topk:
                                    twin[c] = TWIN
                    for c in T.unroll(2):
                        entry = pair * 64 + c * 32 + lane
                        if entry < entries:
                            marks[warp, entry] = T.if_then_else(own[c] >= 0 and owner[c] == entry, mask[c], 0)
                            owners[warp, entry] = T.if_then_else(own[c] >= 0, owner[c] | twin[c], -1)
                T.sync_warp()
                # Blocks that all queries select, then those that all but one select, and so on.
                listed = 0
                for less in T.serial(tile_tokens):
                    most = T.if_then_else(tile_tokens - less >= enough, capacity, T.min(fill, capacity))
                    if listed < most:
                        for chunk in T.serial(chunks):
                            entry = chunk * 32 + lane
                            mark = 0
                            if entry < entries:
                                mark = marks[warp, entry]
                            takers = ballot((mark >> 8) == tile_tokens - less)
                            rank = listed + count_bits(takers & bits_below(lane))
                            if (mark >> 8) == tile_tokens - less and rank < most:
                                row = rows[warp, entry]
                                word = mark & 255
                                token = first_bit(T.cast(word, "uint32"))
                                if word != (1 << tokens) - 1:
                                    word = word | CUT
                                for t in T.unroll(tile_tokens):
                                    if ((mark >> t) & 1) != 0:
                                        if starts[warp, t] + limits[warp, t] - row < block_size - 1:
                                            word = word | CUT
                                valid = T.min(starts[warp, token] + lengths[warp, token] - row, block_size)
                                shared[head, tile, rank, 0] = row
                                shared[head, tile, rank, 1] = word | (valid << VALID_SHIFT)
                                owners[warp, entry] = entry | SHARED
                            listed = T.min(listed + count_bits(takers), most)
                if lane == 0:
                    shared_counts[head, tile] = listed
                T.sync_warp()
                for some in T.serial(T.ceildiv(tokens, abreast)):
                    token = some * abreast + beside
                    number = 0
                    for step in T.serial(T.ceildiv(topk, 32)):
                        slot = step * 32 + first_slot
                        kept = 0
                        row = 0
                        if beside < abreast and token < tokens and slot < topk:
                            ownership = owners[warp, token * topk + slot]
                            if ownership >= 0 and (ownership & TWIN) == 0:
                                if (owners[warp, ownership & ENTRY] & SHARED) == 0:
                                    kept = 1
                                    row = rows[warp, token * topk + slot]
                        keepers = ballot(kept > 0) & fellows
                        if kept > 0:
                            rest[head, first_token + token, number + count_bits(keepers & bits_below(lane))] = (
                                row - starts[warp, token]
                            ) // block_size
                        number = number + count_bits(keepers)
                    if beside < abreast and token < tokens:
                        for step in T.serial(T.ceildiv(topk - number - first_slot, 32)):
                            rest[head, first_token + token, number + step * 32 + first_slot] = -1
                        if first_slot == 0:
                            rest_counts[head, first_token + token] = number

    return main
