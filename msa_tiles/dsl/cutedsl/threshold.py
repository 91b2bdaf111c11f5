"""Exact top-k of one row by a whole CTA: keys in registers, the k-th largest key found bit by bit.

Thread t holds the keys of blocks t, t + threads, ... The threshold is the largest number that at least k keys reach:
two of its bits are found at a time, from the top, with one round of counts over the CTA, until exactly k keys reach it.
Where its last bits leave more than k, the keys equal to it are ties, and a search over block ids, bit by bit, keeps the
lowest of them. What remains is listed in an order that depends on the keys alone.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.topk import EMPTY, NAN_KEY, forced_key, order_key, pick
from msa_tiles.dsl.cutedsl.warp import WARP, inclusive_sum

ID_BITS = 15


class Row(NamedTuple):
    """A row of scores [heads, tokens, blocks]: the best of `heads` heads from first_head on."""

    score: Any
    first_head: Any
    heads: Any
    token: Any


class Best(NamedTuple):
    """Shared memory of the search: counts of the warps, and the blocks that it found."""

    sums: Any  # [warps, 2, 2] int32
    ids: Any  # int32, as many as are wanted at most


@cute.jit
def read_scores(
    row: Row, first: cutlass.Constexpr, last: cutlass.Constexpr, end: Int32, best: cute.Tensor,
    threads: cutlass.Constexpr,
):  # fmt: skip
    """Raise best[j], for j from first to last - 1, to the best score of block j * threads + thread below `end`.

    NaN gives way unless every head has one; best begins as NaN.
    """
    thread, _, _ = cute.arch.thread_idx()
    for r in cutlass.range(row.heads, unroll=1):
        scores = row.score[row.first_head + r, row.token, None]
        for j in cutlass.range_constexpr(first, last):
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
def list_best(keys: cute.Tensor, wanted: Int32, valid: Int32, best: Best, threads: cutlass.Constexpr):
    """The blocks of the `wanted` best keys of `valid` ones, in the first places of the list.

    All threads must call it; the list is there for all of them when it returns.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
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
    until = inclusive_sum(mine, lane)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if lane == WARP - 1:
        best.sums[warp, 0, turn & 1] = until
    cute.arch.sync_threads()
    before = Int32(0)
    if lane < warp:
        before = best.sums[lane, 0, turn & 1]
    place = add(before) + until - mine
    for j in cutlass.range_constexpr(count):
        if stays(keys[j], j * threads + thread, threshold, end_id, wanted):
            best.ids[place] = j * threads + thread
            place = place + 1
    cute.arch.sync_threads()


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
