"""Exact top-k of one row by a whole CTA: keys in registers, the k-th largest key found bit by bit.

Thread t holds the keys of blocks t, t + threads, ... as unsigned numbers in the order of the scores. The threshold is
the largest number that at least k keys reach: two of its bits are found at a time, from the top, with one round of
counts over the CTA, until exactly k keys reach it. Where its last bits leave more than k, the keys equal to it are
ties, and a search over block ids, bit by bit, keeps the lowest of them. What remains is listed in an order that depends
on the keys alone.
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
def list_best(tx, threads, per_thread, keys, wanted, sums, listed_ids, listed_keys):
    """The `wanted` best keys and their blocks, in the first places of the shared lists."""
    count = T.alloc_local([2], "int32")
    threshold = T.alloc_var("uint32")
    step_size = T.alloc_var("uint32")
    reached = T.alloc_var("int32")
    ties = T.alloc_var("int32")
    end_id = T.alloc_var("int32")
    place = T.alloc_var("int32")
    mine = T.alloc_var("int32")
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
    # How many each thread keeps, and with the sum over the threads before it, where its first one goes.
    mine = 0
    for j in T.unroll(per_thread):
        if wanted > 0 and (keys[j] > threshold or (keys[j] == threshold and j * threads + tx < end_id)):
            mine = mine + 1
    place = mine
    for step in T.unroll(5):
        count[0] = T.shfl_up(place, 1 << step)
        if tx % 32 >= (1 << step):
            place = place + count[0]
    if tx % 32 == 31:
        sums[turn & 1, tx // 32] = place
    place = place - mine
    T.sync_threads()
    for w in T.unroll(threads // 32 - 1):
        if w < tx // 32:
            place = place + sums[turn & 1, w]
    for j in T.unroll(per_thread):
        if wanted > 0 and (keys[j] > threshold or (keys[j] == threshold and j * threads + tx < end_id)):
            listed_ids[place] = j * threads + tx
            listed_keys[place] = keys[j]
            place = place + 1
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
