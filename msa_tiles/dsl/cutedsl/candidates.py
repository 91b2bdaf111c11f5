"""Exact top-k of a row by one warp that reads every score once and looks closely at a few candidates.

A chunk is CHUNK columns of the row, 32 of them a lane, neighbours on neighbouring lanes, as floats in registers. The
least of the larger half of the lanes' maxima is reached by enough scores, and by few more: the candidates. One float
subtraction and one shift a score mark them in a mask for each lane; transposing the masks puts the candidates in the
order of their blocks, in which they enter a pool in shared memory. The pool's exact keys are sorted across the warp,
without the blocks: the k-th largest tells who stays, and among equals the first ones. What stays takes part in the
next chunk. If a pool overflows, because many scores tie, what stays raises the bar for the columns that are left.

SLOTS for a capacity: maxima and pool entries of a lane; a chunk has 32 SLOTS maxima for at most 16 SLOTS places.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.topk import EMPTY, INFINITY_BITS, LOCAL_KEY, forced_key, order_key, pick
from msa_tiles.dsl.cutedsl.varlen import key_length, last_at_most, last_visible
from msa_tiles.dsl.cutedsl.warp import (
    WARP,
    at_place,
    ballot,
    bits_below,
    count_bits,
    first_bit,
    inclusive_sum,
    least_of_larger_half,
    sort_descending,
    transpose,
)
from msa_tiles.dsl.table import declares

COLUMNS = 32  # of a chunk on one lane
CHUNK = WARP * COLUMNS
GROUP = 8  # columns of a lane that are present or absent together
SHARE = 16  # places of a list for each slot


@declares
def slots_of(capacity):
    """Maxima and pool entries of a lane, for lists of a capacity."""
    return max(capacity // SHARE, 1)


class Row(NamedTuple):
    """A row of scores [heads, tokens, blocks]: the best of `heads` heads from first_head on, blocks below valid."""

    score: Any
    first_head: Any
    heads: Any
    token: Any
    valid: Any
    init_blocks: Any
    local_blocks: Any


class Lists(NamedTuple):
    """Shared memory of one warp: candidates, and what stays of them in ascending order of the blocks, with keys."""

    pool: Any  # [32 slots] int32 blocks
    ids: Any  # [16 slots] int32
    keys: Any  # [16 slots] int32


class Lengths(NamedTuple):
    """What says how many blocks a row may choose from: mode 0 its query's position, 1 `count`, 2 counts[token]."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    q_positions: Any
    use_seqused: Any
    use_positions: Any
    block_size: Any
    mode: Any
    count: Any
    counts: Any


@cute.jit
def valid_blocks(lengths: Lengths, token: Int32, width: Int32) -> Int32:
    """How many of a row's `width` blocks it may choose from; tokens past the last request choose nothing."""
    valid = Int32(0)
    if token < lengths.cu_seqlens_q[cute.size(lengths.cu_seqlens_q) - 1]:
        if lengths.mode == 0:
            request = last_at_most(lengths.cu_seqlens_q, token)
            length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
            first_limit = length - lengths.cu_seqlens_q[request + 1] + token
            limit = last_visible(lengths.q_positions, lengths.use_positions, token, token, first_limit, length)
            valid = (cutlass.max(limit + 1, 0) + lengths.block_size - 1) // lengths.block_size
        elif lengths.mode == 1:
            valid = lengths.count
        else:
            valid = lengths.counts[token]
        valid = cutlass.max(cutlass.min(valid, width), 0)
    return valid


@cute.jit
def columns_below(end: Int32, lane: Int32) -> Int32:
    """Which of a lane's columns come before column `end` of the chunk."""
    return bits_below((end - lane + (WARP - 1)) >> 5)


@cute.jit
def score_of(row: Row, block: Int32) -> Float32:
    """The score of one block; NaN gives way unless every head has one."""
    score = row.score[row.first_head, row.token, block]
    for r in cutlass.range(1, row.heads, unroll=1):
        score = cute.arch.fmax(score, row.score[row.first_head + r, row.token, block])
    return score


@cute.jit
def read_head(
    row: Row, head: Int32, base: Int32, left: Int32, lane: Int32, values: cute.Tensor, first: cutlass.Constexpr
):
    """Read one head's chunk at column `base`, of which `left` columns exist; NaN for the rest of a group.

    Groups that do not exist at all are left as they are. Later heads raise the values.
    """
    scores = cute.domain_offset((base + lane,), row.score[head, row.token, None])
    for group in cutlass.range_constexpr(COLUMNS // GROUP):
        begin = group * GROUP
        if left >= WARP * (begin + GROUP):
            for j in cutlass.range_constexpr(begin, begin + GROUP):
                got = Float32(scores[WARP * j])
                values[j] = got if cutlass.const_expr(first) else cute.arch.fmax(values[j], got)
        elif left > WARP * begin:
            for j in cutlass.range_constexpr(begin, begin + GROUP):
                got = Float32.nan
                if lane < left - WARP * j:
                    got = Float32(scores[WARP * j])
                values[j] = got if cutlass.const_expr(first) else cute.arch.fmax(values[j], got)


@cute.jit
def read_chunk(row: Row, base: Int32, left: Int32, lane: Int32, values: cute.Tensor):
    """The chunk at column `base`: the best of all heads; NaN gives way unless every head has one."""
    read_head(row, row.first_head, base, left, lane, values, True)
    for r in cutlass.range(1, row.heads, unroll=1):
        read_head(row, row.first_head + r, base, left, lane, values, False)


@cute.jit
def tree_max(
    values: cute.Tensor, begin: cutlass.Constexpr, step: cutlass.Constexpr, count: cutlass.Constexpr
) -> Float32:
    """The largest of `count` values, a power of two; NaN only if all are."""
    best = values[begin]
    if cutlass.const_expr(count > 1):
        best = cute.arch.fmax(
            tree_max(values, begin, step, count // 2), tree_max(values, begin + step * (count // 2), step, count // 2)
        )
    return best


@cute.jit
def maxima(values: cute.Tensor, left: Int32, forced: Int32, tops: cute.Tensor):
    """The key of the best of a lane's columns, for each of its slots; infinity for a forced block."""
    slots = cute.size(tops)
    best = cute.make_rmem_tensor(slots, Float32)
    best.fill(Float32.nan)
    for group in cutlass.range_constexpr(COLUMNS // GROUP):
        if left > WARP * GROUP * group:
            for s in cutlass.range_constexpr(slots):
                best[s] = cute.arch.fmax(best[s], tree_max(values, GROUP * group + s, slots, GROUP // slots))
    for s in cutlass.range_constexpr(slots):
        ours = sum(1 << c for c in range(s, COLUMNS, slots))
        ours = ours - (1 << 32) if cutlass.const_expr(ours >= 1 << 31) else ours
        tops[s] = pick((forced & ours) != 0, INFINITY_BITS, order_key(best[s]))


@cute.jit
def float_of(key: Int32) -> Float32:
    """The float of an order key; infinity for what stands above."""
    key = cutlass.min(key, Int32(INFINITY_BITS))
    return pick(key < 0, Int32(EMPTY) - key, key).bitcast(Float32)


@cute.jit
def push_sign(bits: Int32, number: Float32) -> Int32:
    """Shift the sign of a number in at the bottom."""
    return Int32(
        cute.arch.inline_ptx(
            "shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, 1;",
            write_only_types=[Int32],
            read_only_args=[number.bitcast(Int32), bits],
        )
    )


@cute.jit
def above(values: cute.Tensor, left: Int32, floor: Float32) -> Int32:
    """Which of a lane's columns exceed the floor, one bit each. NaN does not, and no sum with an infinity misleads."""
    bits = Int32(0)
    for back in cutlass.range_constexpr(COLUMNS // GROUP):
        begin = COLUMNS - GROUP * (back + 1)
        if left > WARP * begin:
            for j in cutlass.range_constexpr(GROUP):
                bits = push_sign(bits, floor - values[begin + GROUP - 1 - j])
    return bits


@cute.jit
def keep_best(row: Row, lists: Lists, count: Int32, wanted: Int32, lane: Int32) -> Int32:
    """Keep the `wanted` best of the pool's `count` blocks; the least key among them."""
    slots = cute.size(lists.pool) // WARP
    blocks = cute.make_rmem_tensor(slots, Int32)
    keys = cute.make_rmem_tensor(slots, Int32)
    order = cute.make_rmem_tensor(slots, Int32)
    for s in cutlass.range_constexpr(slots):
        blocks[s] = Int32(0)
        keys[s] = Int32(EMPTY)
        if WARP * s + lane < count:
            blocks[s] = lists.pool[WARP * s + lane]
            key = order_key(score_of(row, blocks[s]))
            keys[s] = forced_key(key, blocks[s], row.valid, row.init_blocks, row.local_blocks)
        order[s] = keys[s]
    least = Int32(0)
    if wanted == SHARE * slots:
        least = least_of_larger_half(order, lane)
    else:
        sort_descending(order, lane)
        least = at_place(order, wanted - 1)
    ties = wanted
    for s in cutlass.range_constexpr(slots):
        ties = ties - count_bits(ballot(keys[s] > least))
    below = bits_below(lane)
    begin = Int32(0)
    for s in cutlass.range_constexpr(slots):
        equal = ballot(keys[s] == least)
        stays = (keys[s] > least) | ((keys[s] == least) & (count_bits(equal & below) < ties))
        ties = ties - count_bits(equal)
        staying = ballot(stays)
        place = begin + count_bits(staying & below)
        if stays:
            lists.ids[place] = blocks[s]
            lists.keys[place] = keys[s]
        begin = begin + count_bits(staying)
    cute.arch.sync_warp()
    return least


@cute.jit
def stay(lists: Lists, kept: Int32, least: Int32, lane: Int32) -> Int32:
    """Put what was kept and reaches `least` in front of the pool; its number."""
    begin = Int32(0)
    for s in cutlass.range_constexpr((cute.size(lists.ids) + WARP - 1) // WARP):
        place = WARP * s + lane
        stays = cutlass.Boolean(False)
        if place < kept:
            stays = lists.keys[place] >= least
        staying = ballot(stays)
        if stays:
            lists.pool[begin + count_bits(staying & bits_below(lane))] = lists.ids[place]
        begin = begin + count_bits(staying)
    return begin


@cute.jit
def select_topk(row: Row, lists: Lists, begin: Int32, end: Int32, topk: Int32, lane: Int32) -> Int32:
    """Leave the best topk blocks of [begin, end) in lists.ids and lists.keys, ascending by block; their number.

    A chunk holds more blocks than any list: only after the last one may the list have room left.
    """
    capacity = cute.size(lists.pool)
    slots = capacity // WARP
    values = cute.make_rmem_tensor(COLUMNS, Float32)
    tops = cute.make_rmem_tensor(slots, Int32)
    kept = Int32(0)
    worst = Int32(EMPTY)
    for base in cutlass.range(begin, end, CHUNK, unroll=1):
        left = end - base
        read_chunk(row, base, left, lane, values)
        window = columns_below(left, lane)
        forced = columns_below(row.init_blocks - base, lane) | ~columns_below(row.valid - row.local_blocks - base, lane)
        # No later forced block beats one that is kept.
        forced = pick(worst >= LOCAL_KEY, 0, forced & window)
        maxima(values, left, forced, tops)
        # Forced blocks come on their own; scores have to exceed `over`.
        over = cutlass.min(worst, Int32(INFINITY_BITS))
        promising = forced != 0
        for s in cutlass.range_constexpr(slots):
            promising = promising | (tops[s] > over)
        if (kept == 0) | cute.arch.vote_any_sync(promising):
            least = Int32(EMPTY)
            if kept + left > capacity:
                for s in cutlass.range_constexpr((cute.size(lists.ids) + WARP - 1) // WARP):
                    if WARP * s + lane < kept:
                        key = cutlass.min(lists.keys[WARP * s + lane], Int32(INFINITY_BITS))
                        tops[s] = cutlass.max(tops[s], key)
                least = least_of_larger_half(tops, lane)
                over = cutlass.max(over, least - 1)
            more = cutlass.Boolean(True)
            while more:
                marked = above(values, left, float_of(over))
                # Below minus infinity no float tells who is a candidate: all are.
                marked = pick(over < -INFINITY_BITS, -1, marked) | forced
                found = transpose(marked & window, lane)
                own = count_bits(found)
                until = inclusive_sum(own, lane)
                staying = Int32(0)
                if kept > 0:
                    staying = stay(lists, kept, least, lane)
                count = staying + cute.arch.shuffle_sync(until, WARP - 1)
                place = staying + until - own
                while (found != 0) & (place < capacity):
                    lists.pool[place] = base + WARP * lane + first_bit(found)
                    found = found & (found - 1)
                    place = place + 1
                more = count > capacity
                if more:
                    first = pick(found != 0, WARP * lane + first_bit(found), CHUNK)
                    window = window & ~columns_below(Int32(cute.arch.warp_redux_sync(first, "min")), lane)
                count = cutlass.min(count, Int32(capacity))
                cute.arch.sync_warp()
                kept = cutlass.min(count, topk)
                worst = keep_best(row, lists, count, kept, lane)
                over = cutlass.min(worst, Int32(INFINITY_BITS))
                forced = pick(worst >= LOCAL_KEY, 0, forced)
                least = Int32(EMPTY)
    return kept


@cute.jit
def rank(ids: cute.Tensor, keys: cute.Tensor, count: Int32, entry: Int32, order: Int32) -> Int32:
    """Where an entry of `count` blocks stands: 0 ascending ids, 1 as ranked (init, local, descending score), 2 init,
    descending score, local last.
    """
    block, key = ids[entry], keys[entry]
    key = pick((order == 0) | ((order == 2) & (key == LOCAL_KEY)), EMPTY, key)
    place = Int32(0)
    for i in cutlass.range(count, unroll=1):
        other = keys[i]
        other = pick((order == 0) | ((order == 2) & (other == LOCAL_KEY)), EMPTY, other)
        place = place + pick((other > key) | ((other == key) & (ids[i] < block)), 1, 0)
    return place
