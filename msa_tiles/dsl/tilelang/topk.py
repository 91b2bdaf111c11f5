"""A top-k list that one thread keeps in registers: keys descending, equal keys by ascending block id.

Keys are int32 whose order is the order of the scores, so that comparisons are exact and total: NaN is below -inf, both
zeros are equal, and forced blocks stand above every score.
"""

import tilelang.language as T

EMPTY = -(2**31)
NAN_KEY = EMPTY + 1
INFINITY_BITS = 0x7F800000
INIT_KEY = 2**31 - 1
LOCAL_KEY = INIT_KEY - 1
NO_ID = 2**31 - 1


def order_key(score):
    """The int32 key of a float32 score; bits only, since simplifiers take `x != x` and `x + 0` for what they seem."""
    bits = T.reinterpret(score, "int32")
    magnitude = bits & T.int32(0x7FFFFFFF)
    return T.if_then_else(magnitude > INFINITY_BITS, T.int32(NAN_KEY), T.if_then_else(bits < 0, -magnitude, magnitude))


def forced_key(key, block, valid, init_blocks, local_blocks):
    """The key of a block once forced: the first init_blocks of a row, then its last local_blocks, above all scores."""
    return T.if_then_else(
        block < init_blocks,
        T.int32(INIT_KEY),
        T.if_then_else(block >= valid - local_blocks, T.int32(LOCAL_KEY), key),
    )


@T.macro
def clear(keys, ids, capacity):
    """Empty the list."""
    for j in T.unroll(capacity):
        keys[j] = EMPTY
        ids[j] = NO_ID


@T.macro
def insert(keys, ids, capacity, key, block):
    """Insert a block that comes after every block in the list: among equal keys it goes last."""
    if key > keys[capacity - 1]:
        for back in T.unroll(capacity - 1):
            j = capacity - 1 - back
            ids[j] = T.if_then_else(key > keys[j - 1], ids[j - 1], T.if_then_else(key > keys[j], block, ids[j]))
            keys[j] = T.max(keys[j], T.min(key, keys[j - 1]))
        ids[0] = T.if_then_else(key > keys[0], block, ids[0])
        keys[0] = T.max(keys[0], key)


@T.macro
def order_pair(keys, ids, upper, lower):
    """Exchange two entries unless the upper one ranks first: larger key, or equal key and lower id."""
    key = T.alloc_var("int32")
    block = T.alloc_var("int32")
    if keys[lower] > keys[upper] or (keys[lower] == keys[upper] and ids[lower] < ids[upper]):
        key = keys[upper]
        block = ids[upper]
        keys[upper] = keys[lower]
        ids[upper] = ids[lower]
        keys[lower] = key
        ids[lower] = block


@T.macro
def merge(keys, ids, capacity, lanes, keep):
    """Merge the list of the thread `lanes` lanes up into the list of each thread with `keep`; ids in any order.

    The better of entry j here and entry capacity - 1 - j there make up the best `capacity` of both, as a bitonic
    sequence, which log2(capacity) rounds of exchanges put in order. capacity is a power of two.
    """
    key = T.alloc_var("int32")
    block = T.alloc_var("int32")
    for j in T.unroll(capacity):
        key = T.shfl_down(keys[capacity - 1 - j], lanes)
        block = T.shfl_down(ids[capacity - 1 - j], lanes)
        if keep and (key > keys[j] or (key == keys[j] and block < ids[j])):
            keys[j] = key
            ids[j] = block
    for level in T.unroll(capacity.bit_length() - 1):
        for pair in T.unroll(capacity // 2):
            stride = capacity >> (level + 1)
            upper = pair // stride * (2 * stride) + pair % stride
            order_pair(keys, ids, upper, upper + stride)


@T.macro
def sort_ids(ids, capacity):
    """Sort the ids ascending; NO_ID ends up last."""
    smaller = T.alloc_var("int32")
    for _ in T.serial(capacity // 2):
        for j in T.unroll(capacity // 2):
            smaller = T.min(ids[2 * j], ids[2 * j + 1])
            ids[2 * j + 1] = T.max(ids[2 * j], ids[2 * j + 1])
            ids[2 * j] = smaller
        for j in T.unroll(capacity // 2 - 1):
            smaller = T.min(ids[2 * j + 1], ids[2 * j + 2])
            ids[2 * j + 2] = T.max(ids[2 * j + 1], ids[2 * j + 2])
            ids[2 * j + 1] = smaller


@T.macro
def emit(keys, ids, capacity, valid, topk, order, out, head, token):
    """Write the first topk ids of the list to out[head, token, :] in the wanted order, padded with -1.

    order: 0 ascending ids, 1 as ranked (init, local, descending score), 2 init, descending score, local last.
    """
    taken = T.alloc_var("int32")
    inits = T.alloc_var("int32")
    locals_ = T.alloc_var("int32")
    place = T.alloc_var("int32")
    taken = T.min(valid, topk)
    inits = 0
    locals_ = 0
    for j in T.unroll(capacity):
        if j >= taken:
            ids[j] = NO_ID
        else:
            inits = inits + T.if_then_else(keys[j] == INIT_KEY, 1, 0)
            locals_ = locals_ + T.if_then_else(keys[j] == LOCAL_KEY, 1, 0)
    if order == 0:
        sort_ids(ids, capacity)
    for j in T.unroll(capacity):
        if j < topk:
            place = j
            if order == 2 and j < taken and j >= inits:
                if j < inits + locals_:
                    place = j + taken - inits - locals_
                else:
                    place = j - locals_
            out[head, token, place] = T.if_then_else(ids[j] == NO_ID, -1, ids[j])
