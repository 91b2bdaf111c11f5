"""Exact top-k of one row by a whole CTA, keys in registers.

Thread t holds the keys of blocks t, t + threads, ... as unsigned numbers in the order of the scores. Each warp finds
how high its k / warps best threads reach; the lowest of these marks is reached by at least k keys, and of scores
without an order by few more. Those candidates, if there is one at most for every thread, are ranked against each other.

Where there are more (ties, or the best blocks all in one warp), the k-th largest key is searched: the largest number
that at least k keys reach, two of its bits at a time, from the top, with one round of counts over the CTA, until
exactly k keys reach it. Where its last bits leave more than k, the keys equal to it are ties, and a search over block
ids, bit by bit, keeps the lowest of them. Either way the order of the list depends on the row alone.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang import topk as top

SIGN = 0x80000000
ID_BITS = 15
LOCAL = top.LOCAL_KEY ^ SIGN


@T.macro
def load_keys(
    score, head, heads_per_group, token, tx, threads, per_thread, valid, init_blocks, local_blocks, read, keys
):
    """keys[j] of block j * threads + tx: the best score of the heads of a group, forced blocks on top; 0 for none."""
    for r in T.serial(heads_per_group):
        for j in T.unroll(per_thread):
            if j * threads + tx < valid:
                if r == 0:
                    read[j] = score[head * heads_per_group + r, token, j * threads + tx]
                else:
                    # NaN gives way unless every head has one.
                    read[j] = T.max(read[j], score[head * heads_per_group + r, token, j * threads + tx])
    for j in T.unroll(per_thread):
        keys[j] = T.uint32(0)
        if j * threads + tx < valid:
            keys[j] = T.reinterpret(
                top.forced_key(top.order_key(read[j]), j * threads + tx, valid, init_blocks, local_blocks), "uint32"
            ) ^ T.uint32(SIGN)


@T.macro
def total_of(tx, turn, warps, numbers, sums, count):
    """count[0:numbers] become their sums over the CTA; turns alternate between the rows of sums [2, 2 * warps]."""
    for step in T.unroll(5):
        for n in T.unroll(numbers):
            count[n] = count[n] + T.shfl_xor(count[n], 16 >> step)
    for n in T.unroll(numbers):
        if tx % 32 == 0:
            sums[turn & 1, n * warps + tx // 32] = count[n]
    T.sync_threads()
    for n in T.unroll(numbers):
        count[n] = 0
        for w in T.unroll(warps):
            count[n] = count[n] + sums[turn & 1, n * warps + w]


@T.macro
def list_best(tx, threads, per_thread, keys, wanted, sums, candidate_ids, candidate_keys, listed_ids, listed_keys):
    """The `wanted` best keys and their blocks, in the first places of the shared lists.

    candidate_ids and candidate_keys hold one entry for each thread, sums [2, 2 * warps].
    """
    mark = T.alloc_local([1], "uint32")
    place = T.alloc_local([2], "int32")
    rank = T.alloc_var("int32")
    common_mark(tx, threads, per_thread, keys, wanted, sums, mark)
    place[0] = 0
    for j in T.unroll(per_thread):
        if keys[j] >= mark[0]:
            place[0] = place[0] + 1
    places_of(tx, threads, 1, sums, place)
    if place[1] <= threads:
        for j in T.unroll(per_thread):
            if keys[j] >= mark[0]:
                candidate_ids[place[0]] = j * threads + tx
                candidate_keys[place[0]] = keys[j]
                place[0] = place[0] + 1
        T.sync_threads()
        if tx < place[1]:
            rank = 0
            for i in T.serial(place[1]):
                if candidate_keys[i] > candidate_keys[tx] or (
                    candidate_keys[i] == candidate_keys[tx] and candidate_ids[i] < candidate_ids[tx]
                ):
                    rank = rank + 1
            if rank < wanted:
                listed_ids[rank] = candidate_ids[tx]
                listed_keys[rank] = candidate_keys[tx]
        T.sync_threads()
    else:
        search(tx, threads, per_thread, keys, wanted, sums, listed_ids, listed_keys)


@T.macro
def common_mark(tx, threads, per_thread, keys, wanted, sums, mark):
    """mark[0] = a number above 0 that at least `wanted` keys reach, or 1 where a warp has too few keys to tell."""
    left = T.alloc_var("uint32")
    left = T.uint32(0)
    for j in T.unroll(per_thread):
        left = T.max(left, keys[j])
    mark[0] = T.uint32(0)
    for _ in T.serial(T.truncdiv(wanted + threads // 32 - 1, threads // 32)):
        mark[0] = left
        for step in T.unroll(5):
            mark[0] = T.max(mark[0], T.shfl_xor(mark[0], 16 >> step))
        # Threads of equal height go together: then more of them reach the mark, never fewer.
        if left == mark[0]:
            left = T.uint32(0)
    if tx % 32 == 0:
        sums[0, tx // 32] = T.reinterpret(mark[0], "int32")
    T.sync_threads()
    for w in T.unroll(threads // 32):
        mark[0] = T.min(mark[0], T.reinterpret(sums[0, w], "uint32"))
    mark[0] = T.max(mark[0], T.uint32(1))


@T.macro
def places_of(tx, threads, row, sums, place):
    """place = (the sum of place[0] over the threads before, over all); takes a barrier and a row of sums."""
    mine = T.alloc_var("int32")
    before = T.alloc_var("int32")
    mine = place[0]
    for step in T.unroll(5):
        before = T.shfl_up(place[0], 1 << step)
        if tx % 32 >= (1 << step):
            place[0] = place[0] + before
    if tx % 32 == 31:
        sums[row, tx // 32] = place[0]
    place[0] = place[0] - mine
    T.sync_threads()
    place[1] = 0
    for w in T.unroll(threads // 32):
        if w < tx // 32:
            place[0] = place[0] + sums[row, w]
        place[1] = place[1] + sums[row, w]


@T.macro
def search(tx, threads, per_thread, keys, wanted, sums, listed_ids, listed_keys):
    """list_best by thresholds alone: any number of equal keys, in any place."""
    count = T.alloc_local([2], "int32")
    threshold = T.alloc_var("uint32")
    step_size = T.alloc_var("uint32")
    reached = T.alloc_var("int32")
    ties = T.alloc_var("int32")
    end_id = T.alloc_var("int32")
    place = T.alloc_local([2], "int32")
    bit = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    threshold = T.uint32(0)
    reached = per_thread * threads
    bit = 30
    turn = 0
    while bit >= 0 and reached != wanted:
        step_size = T.uint32(1) << T.cast(bit, "uint32")
        count[0] = 0
        count[1] = 0
        # How many reach one, two and three steps: the first two share a word, neither sum needs 16 bits.
        for j in T.unroll(per_thread):
            if keys[j] >= threshold + step_size:
                count[0] = count[0] + 1
            if keys[j] >= threshold + T.uint32(2) * step_size:
                count[0] = count[0] + (1 << 16)
            if keys[j] >= threshold + T.uint32(3) * step_size:
                count[1] = count[1] + 1
        total_of(tx, turn, threads // 32, 2, sums, count)
        if count[1] >= wanted:
            threshold = threshold + T.uint32(3) * step_size
            reached = count[1]
        elif (count[0] >> 16) >= wanted:
            threshold = threshold + T.uint32(2) * step_size
            reached = count[0] >> 16
        elif (count[0] & 0xFFFF) >= wanted:
            threshold = threshold + step_size
            reached = count[0] & 0xFFFF
        bit = bit - 2
        turn = turn + 1
    # Ties from end_id on stay out.
    end_id = 1 << ID_BITS
    if reached != wanted:
        count[0] = 0
        for j in T.unroll(per_thread):
            if keys[j] > threshold:
                count[0] = count[0] + 1
        total_of(tx, turn, threads // 32, 1, sums, count)
        turn = turn + 1
        ties = wanted - count[0]
        end_id = 0
        bit = ID_BITS - 1
        while bit >= 0:
            count[0] = 0
            for j in T.unroll(per_thread):
                if keys[j] == threshold and j * threads + tx < (end_id | (1 << bit)):
                    count[0] = count[0] + 1
            total_of(tx, turn, threads // 32, 1, sums, count)
            if count[0] <= ties:
                end_id = end_id | (1 << bit)
            bit = bit - 1
            turn = turn + 1
    place[0] = 0
    for j in T.unroll(per_thread):
        if wanted > 0 and (keys[j] > threshold or (keys[j] == threshold and j * threads + tx < end_id)):
            place[0] = place[0] + 1
    places_of(tx, threads, turn & 1, sums, place)
    for j in T.unroll(per_thread):
        if wanted > 0 and (keys[j] > threshold or (keys[j] == threshold and j * threads + tx < end_id)):
            listed_ids[place[0]] = j * threads + tx
            listed_keys[place[0]] = keys[j]
            place[0] = place[0] + 1
    T.sync_threads()


@T.macro
def write_row(tx, k, wanted, order, listed_ids, listed_keys, out, head, token):
    """Write the listed blocks to out[head, token, 0:k] in the wanted order, padded with -1; thread t ranks entry t.

    order: 0 ascending ids, 1 as ranked (init, local, descending score), 2 init, descending score, local last.
    """
    place = T.alloc_var("int32")
    mine = T.alloc_var("int32")
    key = T.alloc_var("uint32")
    other = T.alloc_var("uint32")
    if tx < k:
        place = tx
        mine = -1
        if tx < wanted:
            mine = listed_ids[tx]
            key = listed_keys[tx]
            if order == 2 and key == T.uint32(LOCAL):
                key = T.uint32(0)
            place = 0
            for i in T.serial(wanted):
                other = listed_keys[i]
                if order == 0:
                    other = T.uint32(0)
                    key = T.uint32(0)
                elif order == 2 and other == T.uint32(LOCAL):
                    other = T.uint32(0)
                if other > key or (other == key and listed_ids[i] < mine):
                    place = place + 1
        out[head, token, place] = mine
