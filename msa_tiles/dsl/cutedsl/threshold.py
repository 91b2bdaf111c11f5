"""Exact top-k of one row by a whole CTA, keys in registers.

Thread t holds the keys of blocks t, t + threads, ... Each warp finds how high its k / warps best threads reach; the
lowest of these marks is reached by at least k keys, and of scores without an order by few more. Those candidates, if
there is one at most for every thread, are ranked against each other.

Where there are more (ties, or the best blocks all in one warp), the k-th largest key is searched, the largest number
that at least k keys reach: two of its bits are found at a time, from the top, with one round of counts over the CTA,
until exactly k keys reach it. Where its last bits leave more than k, the keys equal to it are ties, and a search over
block ids, bit by bit, keeps the lowest of them. Either way the order of the list depends on the keys alone.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.topk import EMPTY, NAN_KEY, forced_key, order_key, pick, ranks_above
from msa_tiles.dsl.cutedsl.warp import inclusive_sum
from msa_tiles.dsl.table import WARP

ID_BITS = 15


class Row(NamedTuple):
    """A row of scores [heads, tokens, blocks]: the best of `heads` heads from first_head on."""

    score: Any
    first_head: Any
    heads: Any
    token: Any


class Best(NamedTuple):
    """Shared memory of the choice: what warps tell each other, the candidates, and the blocks that were chosen."""

    sums: Any  # [warps, 2, 2] int32
    candidates: Any  # [threads, (id, key)] int32
    ids: Any  # int32, as many as are wanted at most


@cute.jit
def read_scores(row: Row, end: Int32, best: cute.Tensor, threads: cutlass.Constexpr):
    """Raise best[j] to the best score of block j * threads + thread, where that is below `end`.

    NaN gives way unless every head has one; best begins as NaN.
    """
    thread, _, _ = cute.arch.thread_idx()
    for r in cutlass.range(row.heads, unroll=1):
        scores = row.score[row.first_head + r, row.token, None]
        for j in cutlass.range_constexpr(cute.size(best)):
            if j * threads + thread < end:
                best[j] = cute.arch.fmax(best[j], scores[j * threads + thread])


@cute.jit
def keys_of(best: cute.Tensor, valid: Int32, init_blocks: Int32, local_blocks: Int32, threads: cutlass.Constexpr):
    """The keys of the scores, forced blocks on top; EMPTY from block `valid` on."""
    thread, _, _ = cute.arch.thread_idx()
    keys = cute.make_rmem_tensor(best.layout, Int32)
    for j in cutlass.range_constexpr(cute.size(keys)):
        block = j * threads + thread
        key = forced_key(order_key(best[j]), block, valid, init_blocks, local_blocks)
        keys[j] = pick(block < valid, key, EMPTY)
    return keys


@cute.jit
def add(value: Int32) -> Int32:
    """The sum over the lanes of a warp."""
    return Int32(cute.arch.warp_redux_sync(value, "add"))


@cute.jit
def totals(first: Int32, second: Int32, turn: Int32, sums: cute.Tensor):
    """Two sums over the CTA. Turns alternate, so that one barrier a turn is enough; all threads must call it."""
    lane = cute.arch.lane_idx()
    warps = cute.size(sums, mode=[0])
    first, second = add(first), add(second)
    if lane == 0:
        warp = cute.arch.warp_idx()
        sums[warp, 0, turn & 1] = first
        sums[warp, 1, turn & 1] = second
    cute.arch.sync_threads()
    first, second = Int32(0), Int32(0)
    if lane < warps:
        first = sums[lane, 0, turn & 1]
        second = sums[lane, 1, turn & 1]
    return add(first), add(second)


@cute.jit
def places(mine: Int32, sums: cute.Tensor, turn: Int32):
    """The sum of `mine` over the threads before, and over all; a barrier and a turn of the sums. All must call it."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    until = inclusive_sum(mine, lane)
    if lane == WARP - 1:
        sums[warp, 0, turn & 1] = until
    cute.arch.sync_threads()
    of_lane = Int32(0)
    if lane < cute.size(sums, mode=[0]):
        of_lane = sums[lane, 0, turn & 1]
    return add(pick(lane < warp, of_lane, 0)) + until - mine, add(of_lane)


@cute.jit
def common_mark(keys: cute.Tensor, wanted: Int32, sums: cute.Tensor) -> Int32:
    """A number above EMPTY that at least `wanted` keys reach, if there are so many; takes a barrier and turn 0."""
    lane = cute.arch.lane_idx()
    warps = cute.size(sums, mode=[0])
    left = Int32(EMPTY)
    for j in cutlass.range_constexpr(cute.size(keys)):
        left = cutlass.max(left, keys[j])
    mark = Int32(EMPTY)
    for _ in cutlass.range((wanted + warps - 1) // warps, unroll=1):
        mark = Int32(cute.arch.warp_redux_sync(left, "max"))
        # Threads of equal height go together: then more of them reach the mark, never fewer.
        left = pick(left == mark, EMPTY, left)
    if lane == 0:
        sums[cute.arch.warp_idx(), 0, 0] = mark
    cute.arch.sync_threads()
    if lane < warps:
        mark = sums[lane, 0, 0]
    return cutlass.max(Int32(cute.arch.warp_redux_sync(mark, "min")), Int32(NAN_KEY))


@cute.jit
def list_best(keys: cute.Tensor, wanted: Int32, valid: Int32, best: Best, threads: cutlass.Constexpr):
    """The blocks of the `wanted` best keys of `valid` ones, in the first places of the list.

    All threads must call it; the list is there for all of them when it returns.
    """
    thread, _, _ = cute.arch.thread_idx()
    mark = common_mark(keys, wanted, best.sums)
    mine = Int32(0)
    for j in cutlass.range_constexpr(cute.size(keys)):
        mine = mine + pick(keys[j] >= mark, 1, 0)
    place, count = places(mine, best.sums, Int32(1))
    if count <= threads:
        for j in cutlass.range_constexpr(cute.size(keys)):
            if keys[j] >= mark:
                best.candidates[place, 0] = j * threads + thread
                best.candidates[place, 1] = keys[j]
                place = place + 1
        cute.arch.sync_threads()
        if thread < count:
            block, key = best.candidates[thread, 0], best.candidates[thread, 1]
            above = Int32(0)
            for i in cutlass.range(count, unroll=4):
                above = above + pick(ranks_above(best.candidates[i, 1], best.candidates[i, 0], key, block), 1, 0)
            if above < wanted:
                best.ids[above] = block
    else:
        search(keys, wanted, valid, best, threads)
    cute.arch.sync_threads()


@cute.jit
def search(keys: cute.Tensor, wanted: Int32, valid: Int32, best: Best, threads: cutlass.Constexpr):
    """list_best by thresholds alone, up to its last barrier: any number of equal keys, in any place."""
    thread, _, _ = cute.arch.thread_idx()
    count = cute.size(keys)
    low = Int32(0xFFFF)
    # So many keys reach the threshold; a row that is wanted whole needs no search.
    threshold = pick(wanted == valid, NAN_KEY, EMPTY)
    reached = pick(wanted == valid, wanted, count * threads)
    bit = Int32(30)
    turn = Int32(0)
    while (bit >= 0) & (reached != wanted):
        step = Int32(1) << bit
        # How many reach one, two and three steps: the first two share a word, neither sum needs 16 bits.
        one, two, three = threshold + step, threshold + step * 2, threshold + step * 3
        pair = Int32(0)
        last = Int32(0)
        for j in cutlass.range_constexpr(count):
            pair = pair + pick(keys[j] >= one, 1, 0)
            pair = pair + pick(keys[j] >= two, 1 << 16, 0)
            last = last + pick(keys[j] >= three, 1, 0)
        pair, last = totals(pair, last, turn, best.sums)
        if last >= wanted:
            threshold = three
            reached = last
        elif (pair >> 16) >= wanted:
            threshold = two
            reached = pair >> 16
        elif (pair & low) >= wanted:
            threshold = one
            reached = pair & low
        bit = bit - 2
        turn = turn + 1
    # Ties from end_id on stay out.
    end_id = Int32(1 << ID_BITS)
    if reached != wanted:
        above = Int32(0)
        for j in cutlass.range_constexpr(count):
            above = above + pick(keys[j] > threshold, 1, 0)
        above, _ = totals(above, Int32(0), turn, best.sums)
        turn = turn + 1
        end_id = Int32(0)
        for i in cutlass.range(ID_BITS, unroll=1):
            trial = end_id | (Int32(1 << (ID_BITS - 1)) >> i)
            ties = Int32(0)
            for j in cutlass.range_constexpr(count):
                ties = ties + pick((keys[j] == threshold) & (j * threads + thread < trial), 1, 0)
            ties, _ = totals(ties, Int32(0), turn, best.sums)
            turn = turn + 1
            end_id = pick(above + ties <= wanted, trial, end_id)
    # How many each thread keeps, and with the sum over the threads before it, where its first one goes.
    mine = Int32(0)
    for j in cutlass.range_constexpr(count):
        mine = mine + pick(stays(keys[j], j * threads + thread, threshold, end_id, wanted), 1, 0)
    place, _ = places(mine, best.sums, turn)
    for j in cutlass.range_constexpr(count):
        if stays(keys[j], j * threads + thread, threshold, end_id, wanted):
            best.ids[place] = j * threads + thread
            place = place + 1


@cute.jit
def stays(key: Int32, block: Int32, threshold: Int32, end_id: Int32, wanted: Int32) -> cutlass.Boolean:
    """Does a block belong to the best?"""
    return (wanted > 0) & ((key > threshold) | ((key == threshold) & (block < end_id)))


@cute.jit
def write_row(best: Best, entry: Int32, wanted: Int32, row: cute.Tensor):
    """Write the listed blocks to a row, ascending and padded with -1; the caller of `entry` ranks that one."""
    if entry < Int32(cute.size(row)):
        place = entry
        block = Int32(-1)
        if entry < wanted:
            block = best.ids[entry]
            place = Int32(0)
            for i in cutlass.range(wanted, unroll=1):
                place = place + pick(best.ids[i] < block, 1, 0)
        row[place] = block
