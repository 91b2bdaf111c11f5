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

import tilelang.language as T

from msa_tiles.dsl.tilelang.topk import EMPTY, INFINITY_BITS, LOCAL_KEY, forced_key, order_key
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_visible
from msa_tiles.dsl.tilelang.warp import (
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

COLUMNS = 32  # of a chunk on one lane
CHUNK = WARP * COLUMNS
GROUP = 8  # columns of a lane that are present or absent together
SHARE = 16  # places of a list for each slot
NAN_BITS = 0x7FFFFFFF


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
    """Shared memory of all warps: candidates, and what stays of them in ascending order of the blocks, with keys."""

    warp: Any
    slots: Any
    pool: Any  # [warps, 32 slots] int32 blocks
    ids: Any  # [warps, 16 slots] int32
    keys: Any  # [warps, 16 slots] int32


class Lengths(NamedTuple):
    """What says how many blocks a row may choose from: mode 0 its query's position, 1 `count`, 2 counts[token]."""

    cu_seqlens_q: Any
    num_requests: Any
    cu_seqlens_k: Any
    seqused_k: Any
    q_positions: Any
    use_seqused: Any
    use_positions: Any
    block_size: Any
    mode: Any
    count: Any
    counts: Any


@T.macro
def valid_blocks(lengths, token, width, valid):
    """valid[0] = how many of a row's `width` blocks it may choose from; tokens past the last request choose nothing."""
    request = T.alloc_local([1], "int32")
    length = T.alloc_var("int32")
    valid[0] = 0
    if token < lengths.cu_seqlens_q[lengths.num_requests]:
        if lengths.mode == 0:
            last_at_most(lengths.cu_seqlens_q, lengths.num_requests, token, request)
            length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request[0])
            length = last_visible(
                lengths.q_positions,
                lengths.use_positions,
                token,
                token,
                length - lengths.cu_seqlens_q[request[0] + 1] + token,
                length,
            )
            valid[0] = T.truncdiv(T.max(length + 1, 0) + lengths.block_size - 1, lengths.block_size)
        elif lengths.mode == 1:
            valid[0] = lengths.count
        else:
            valid[0] = lengths.counts[token]
        valid[0] = T.max(T.min(valid[0], width), 0)


def columns_below(end, lane):
    """Which of a lane's columns come before column `end` of the chunk."""
    return bits_below((end - lane + (WARP - 1)) >> 5)


def each_later(heads):
    """A loop over the heads after the first, for which the compiler shall keep one copy of its body."""
    return T.unroll(1, heads, annotations={"pragma_unroll_factor": 1})


@T.macro
def score_of(row, block, score):
    """score[0] = the score of one block; NaN gives way unless every head has one."""
    score[0] = row.score[row.first_head, row.token, block]
    for r in each_later(row.heads):
        score[0] = T.max(score[0], row.score[row.first_head + r, row.token, block])


@T.macro
def read_head(row, head, base, left, lane, first, values):
    """Read one head's chunk at column `base`, of which `left` columns exist; NaN for the rest of a group.

    Groups that do not exist at all are left as they are. Heads after the first raise the values.
    """
    got = T.alloc_local([GROUP], "float32")
    for group in T.unroll(COLUMNS // GROUP):
        if left > WARP * GROUP * group:
            if left >= WARP * GROUP * (group + 1):
                for j in T.unroll(GROUP):
                    got[j] = row.score[head, row.token, base + lane + WARP * (GROUP * group + j)]
            else:
                for j in T.unroll(GROUP):
                    got[j] = T.reinterpret(T.int32(NAN_BITS), "float32")
                    if WARP * (GROUP * group + j) + lane < left:
                        got[j] = row.score[head, row.token, base + lane + WARP * (GROUP * group + j)]
            for j in T.unroll(GROUP):
                if first:
                    values[GROUP * group + j] = got[j]
                else:
                    values[GROUP * group + j] = T.max(values[GROUP * group + j], got[j])


@T.macro
def read_chunk(row, base, left, lane, values):
    """The chunk at column `base`: the best of all heads; NaN gives way unless every head has one."""
    read_head(row, row.first_head, base, left, lane, True, values)
    for r in each_later(row.heads):
        read_head(row, row.first_head + r, base, left, lane, False, values)


def tree_max(values, begin, step, count):
    """The largest of `count` values, a power of two; NaN only if all are."""
    if count == 1:
        return values[begin]
    half = count // 2
    return T.max(tree_max(values, begin, step, half), tree_max(values, begin + step * half, step, half))


@T.macro
def maxima(values, left, forced, slots, tops):
    """The key of the best of a lane's columns, for each of its slots; infinity for a forced block."""
    best = T.alloc_local([slots], "float32")
    for s in T.unroll(slots):
        best[s] = T.reinterpret(T.int32(NAN_BITS), "float32")
    for group in T.unroll(COLUMNS // GROUP):
        if left > WARP * GROUP * group:
            for s in T.unroll(slots):
                best[s] = T.max(best[s], tree_max(values, GROUP * group + s, slots, GROUP // slots))
    for s in T.unroll(slots):
        ours = T.uint32(sum(1 << c for c in range(0, COLUMNS, slots))) << T.cast(s, "uint32")
        tops[s] = T.if_then_else((forced & ours) != T.uint32(0), T.int32(INFINITY_BITS), order_key(best[s]))


def float_of(key):
    """The float of an order key; infinity for what stands above."""
    key = T.min(key, T.int32(INFINITY_BITS))
    return T.reinterpret(T.if_then_else(key < 0, T.int32(EMPTY) - key, key), "float32")


@T.macro
def above(values, left, floor, marked):
    """marked[0] = which of a lane's columns exceed the floor, one bit each.

    NaN does not, and no difference of infinities misleads: the GPU's NaN is positive.
    """
    number = T.alloc_var("uint32")
    marked[0] = T.uint32(0)
    for back in T.unroll(COLUMNS // GROUP):
        begin = COLUMNS - GROUP - GROUP * back
        if left > WARP * begin:
            for j in T.unroll(GROUP):
                number = T.reinterpret(floor - values[begin + GROUP - 1 - j], "uint32")
                marked[0] = (marked[0] << T.uint32(1)) | (number >> T.uint32(31))


@T.macro
def keep_best(row, lists, count, wanted, lane, least):
    """Keep the `wanted` best of the pool's `count` blocks; least[0] = the least key among them."""
    blocks = T.alloc_local([lists.slots], "int32")
    keys = T.alloc_local([lists.slots], "int32")
    order = T.alloc_local([lists.slots], "int32")
    score = T.alloc_local([1], "float32")
    ties = T.alloc_var("int32")
    begin = T.alloc_var("int32")
    place = T.alloc_var("int32")
    equal = T.alloc_var("uint32")
    staying = T.alloc_var("uint32")
    stays = T.alloc_var("bool")
    for s in T.unroll(lists.slots):
        blocks[s] = 0
        keys[s] = EMPTY
        if WARP * s + lane < count:
            blocks[s] = lists.pool[lists.warp, WARP * s + lane]
            score_of(row, blocks[s], score)
            keys[s] = forced_key(order_key(score[0]), blocks[s], row.valid, row.init_blocks, row.local_blocks)
        order[s] = keys[s]
    if wanted == SHARE * lists.slots:
        least_of_larger_half(order, lists.slots, lane, least)
    else:
        sort_descending(order, lists.slots, lane)
        at_place(order, lists.slots, wanted - 1, least)
    ties = wanted
    for s in T.unroll(lists.slots):
        ties = ties - count_bits(ballot(keys[s] > least[0]))
    begin = 0
    for s in T.unroll(lists.slots):
        equal = ballot(keys[s] == least[0])
        stays = keys[s] > least[0] or (keys[s] == least[0] and count_bits(equal & bits_below(lane)) < ties)
        ties = ties - count_bits(equal)
        staying = ballot(stays)
        if stays:
            place = begin + count_bits(staying & bits_below(lane))
            lists.ids[lists.warp, place] = blocks[s]
            lists.keys[lists.warp, place] = keys[s]
        begin = begin + count_bits(staying)
    T.sync_warp()


@T.macro
def stay(lists, kept, least, lane, count):
    """Put what was kept and reaches `least` in front of the pool; count[0] = its number."""
    staying = T.alloc_var("uint32")
    stays = T.alloc_var("bool")
    count[0] = 0
    for s in T.unroll((SHARE * lists.slots + WARP - 1) // WARP):
        stays = False
        if WARP * s + lane < kept:
            stays = lists.keys[lists.warp, WARP * s + lane] >= least
        staying = ballot(stays)
        if stays:
            lists.pool[lists.warp, count[0] + count_bits(staying & bits_below(lane))] = lists.ids[
                lists.warp, WARP * s + lane
            ]
        count[0] = count[0] + count_bits(staying)


@T.macro
def select_topk(row, lists, topk, lane, kept):
    """Leave the best topk blocks of a row in the lists, ascending by block; kept[0] = their number.

    A chunk holds more blocks than any list: only after the last one may the list have room left.
    """
    slots = lists.slots
    capacity = WARP * slots
    values = T.alloc_local([COLUMNS], "float32")
    tops = T.alloc_local([slots], "int32")
    least = T.alloc_local([1], "int32")
    until = T.alloc_local([1], "int32")
    staying = T.alloc_local([1], "int32")
    marked = T.alloc_local([1], "uint32")
    worst = T.alloc_local([1], "int32")
    base = T.alloc_var("int32")
    left = T.alloc_var("int32")
    window = T.alloc_var("uint32")
    forced = T.alloc_var("uint32")
    found = T.alloc_var("uint32")
    over = T.alloc_var("int32")
    promising = T.alloc_var("bool")
    more = T.alloc_var("bool")
    count = T.alloc_var("int32")
    place = T.alloc_var("int32")
    first = T.alloc_var("int32")
    kept[0] = 0
    worst[0] = EMPTY
    for chunk in T.serial(T.ceildiv(row.valid, CHUNK)):
        base = CHUNK * chunk
        left = row.valid - base
        read_chunk(row, base, left, lane, values)
        window = columns_below(left, lane)
        forced = T.uint32(0)
        # No later forced block beats one that is kept.
        if worst[0] < LOCAL_KEY:
            forced = window & (
                columns_below(row.init_blocks - base, lane) | ~columns_below(row.valid - row.local_blocks - base, lane)
            )
        maxima(values, left, forced, slots, tops)
        # Forced blocks come on their own; scores have to exceed `over`.
        over = T.min(worst[0], T.int32(INFINITY_BITS))
        promising = forced != T.uint32(0)
        for s in T.unroll(slots):
            promising = promising or tops[s] > over
        promising = T.any_sync(promising) != 0
        if kept[0] == 0 or promising:
            least[0] = EMPTY
            if kept[0] + left > capacity:
                for s in T.unroll((SHARE * slots + WARP - 1) // WARP):
                    if WARP * s + lane < kept[0]:
                        tops[s] = T.max(tops[s], T.min(lists.keys[lists.warp, WARP * s + lane], T.int32(INFINITY_BITS)))
                least_of_larger_half(tops, slots, lane, least)
                over = T.max(over, least[0] - 1)
            more = True
            while more:
                above(values, left, float_of(over), marked)
                # Below minus infinity no float tells who is a candidate: all are.
                if over < -INFINITY_BITS:
                    marked[0] = T.uint32(0xFFFFFFFF)
                marked[0] = (marked[0] | forced) & window
                transpose(marked, lane)
                found = marked[0]
                until[0] = count_bits(found)
                inclusive_sum(until, lane)
                staying[0] = 0
                if kept[0] > 0:
                    stay(lists, kept[0], least[0], lane, staying)
                count = staying[0] + T.shfl_sync(until[0], WARP - 1)
                place = staying[0] + until[0] - count_bits(found)
                while found != T.uint32(0) and place < capacity:
                    lists.pool[lists.warp, place] = base + WARP * lane + first_bit(found)
                    found = found & (found - T.uint32(1))
                    place = place + 1
                more = count > capacity
                if more:
                    first = CHUNK
                    if found != T.uint32(0):
                        first = WARP * lane + first_bit(found)
                    first = T.warp_reduce_min(first)
                    window = window & ~columns_below(first, lane)
                count = T.min(count, capacity)
                T.sync_warp()
                kept[0] = T.min(count, topk)
                keep_best(row, lists, count, kept[0], lane, worst)
                over = T.min(worst[0], T.int32(INFINITY_BITS))
                if worst[0] >= LOCAL_KEY:
                    forced = T.uint32(0)
                least[0] = EMPTY


@T.macro
def rank(lists, count, entry, order, place):
    """place[0] = where an entry of `count` blocks stands: order 0 ascending ids, 1 as ranked (init, local, descending
    score), 2 init, descending score, local last.
    """
    key = T.alloc_var("int32")
    other = T.alloc_var("int32")
    block = T.alloc_var("int32")
    block = lists.ids[lists.warp, entry]
    key = lists.keys[lists.warp, entry]
    if order == 0 or (order == 2 and key == LOCAL_KEY):
        key = EMPTY
    place[0] = 0
    for i in T.serial(count):
        other = lists.keys[lists.warp, i]
        if order == 0 or (order == 2 and other == LOCAL_KEY):
            other = EMPTY
        if other > key or (other == key and lists.ids[lists.warp, i] < block):
            place[0] = place[0] + 1
