"""A top-k list behind a queue: candidates wait in shared memory, and the list takes several at once.

Inserting costs a hundred instructions, and a warp pays for it whenever one of its lanes inserts. Late in a row few
blocks get into a list, but nearly always one lane of the 32 has such a block. So a lane only notes what beats its
bound, which takes a few instructions, and when a lane's queue is full the warp sorts what waits and merges it into the
lists: half of what inserting one by one takes. The bound is that of the last time, hence too low at worst; the list
decides.

The list is one of msa_tiles.dsl.cutedsl.topk. Blocks that are forced or invisible are told by their number when they
leave the queue; forced ones are in the list from the start.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from msa_tiles.dsl.cutedsl import topk as top
from msa_tiles.dsl.table import WARP, buffer, declares

WAITING = 8  # candidates that a lane's queue holds
INFINITY = top.INFINITY_BITS  # the key of an infinite score


def exchanges(size):
    """Batcher's odd-even merge sort of `size` entries, a power of two: which pairs to put in order, one by one."""
    pairs = []
    run = 1
    while run < size:
        stride = run
        while stride:
            for first in range(stride % run, size - stride, 2 * stride):
                for upper in range(first, min(first + stride, size - stride)):
                    if upper // (2 * run) == (upper + stride) // (2 * run):
                        pairs.append((upper, upper + stride))
            stride //= 2
        run *= 2
    return tuple(pairs)


SORTED = exchanges(WAITING)


class Candidates:
    """The list of one lane: the row has `valid` blocks, of which some are forced. `queue` is its part of shared memory.

    Registers that change are tensors: the DSL does not follow attributes through control flow.
    """

    def __init__(self, queue, capacity, valid, init_blocks, local_blocks):
        self.queue = queue
        self.valid = valid
        self.init_blocks = init_blocks
        self.local_blocks = local_blocks
        self.keys = cute.make_rmem_tensor(capacity, Int32)
        self.ids = cute.make_rmem_tensor(capacity, Int32)
        self.bound = cute.make_rmem_tensor(1, Float32)  # the least score that may get in
        self.waiting = cute.make_rmem_tensor(1, Int32)
        self.positive = cute.make_rmem_tensor(1, Int32)  # whether the bounds of all lanes of the warp are above 0


@declares
def queues_of(warps):
    """The queues of the lanes of these warps: neighbouring lanes lie side by side."""
    return buffer("queues", "int64", align=128, lanes=WARP, candidates=WAITING, warps=warps)


@cute.jit
def start(row: Candidates):
    """Fill the list with the forced blocks. All lanes of the warp call this and what follows."""
    top.clear(row.keys, row.ids)
    capacity = cute.size(row.keys)
    for block in cutlass.range(cutlass.min(row.init_blocks, capacity), unroll=1):
        top.insert(row.keys, row.ids, top.pick(block < row.valid, top.INIT_KEY, top.EMPTY), block)
    first = cutlass.max(row.valid - row.local_blocks, row.init_blocks)
    for place in cutlass.range(cutlass.min(row.local_blocks, capacity), unroll=1):
        block = first + place
        top.insert(row.keys, row.ids, top.pick(block < row.valid, top.LOCAL_KEY, top.EMPTY), block)
    row.waiting[0] = Int32(0)
    raise_bound(row)


@cute.jit
def offer(row: Candidates, score: Float32, block: Int32):
    """Note a block, in ascending order of blocks, and insert what waits when a queue is full."""
    queue, waiting = row.queue, row.waiting
    if score >= row.bound[0]:
        queue[waiting[0]] = (Int64(score.bitcast(Int32)) << 32) | Int64(block)
        waiting[0] = waiting[0] + 1
    if cute.arch.vote_any_sync(waiting[0] == WAITING):
        settle(row)


@cute.jit
def settle(row: Candidates):
    """Merge what waits into the list."""
    keys = cute.make_rmem_tensor(WAITING, Int32)
    ids = cute.make_rmem_tensor(WAITING, Int32)
    for place in cutlass.range_constexpr(WAITING):
        entry = row.queue[place]
        block = Int32(entry)
        key = top.order_key(Int32(entry >> 32).bitcast(Float32))
        ranked = (place < row.waiting[0]) & (block >= row.init_blocks) & (block < row.valid - row.local_blocks)
        keys[place] = top.pick(ranked, key, top.EMPTY)
        ids[place] = top.pick(ranked, block, top.NO_ID)
    for upper, lower in SORTED:
        top.order_pair(keys, ids, upper, lower)
    absorb(row.keys, row.ids, keys, ids)
    row.waiting[0] = Int32(0)
    raise_bound(row)


@cute.jit
def absorb(keys: cute.Tensor, ids: cute.Tensor, other_keys: cute.Tensor, other_ids: cute.Tensor):
    """Merge a shorter list into one whose capacity is a power of two; see msa_tiles.dsl.cutedsl.topk.merge."""
    capacity = cute.size(keys)
    for other in cutlass.range_constexpr(cute.size(other_keys)):
        j = capacity - 1 - other
        take = top.ranks_above(other_keys[other], other_ids[other], keys[j], ids[j])
        keys[j] = top.pick(take, other_keys[other], keys[j])
        ids[j] = top.pick(take, other_ids[other], ids[j])
    for level in cutlass.range_constexpr(capacity.bit_length() - 1):
        for pair in cutlass.range_constexpr(capacity // 2):
            stride = capacity >> (level + 1)
            upper = pair // stride * (2 * stride) + pair % stride
            top.order_pair(keys, ids, upper, upper + stride)


@cute.jit
def raise_bound(row: Candidates):
    """The bound is the least score above the list's last, or -inf while the list has room."""
    key = row.keys[cute.size(row.keys) - 1]
    key = cutlass.min(cutlass.max(key, -INFINITY - 1), INFINITY - 1) + 1
    row.bound[0] = top.pick(key < 0, Int32(-(2**31)) - key, key).bitcast(Float32)
    row.positive[0] = top.pick(cute.arch.vote_all_sync(key > 0), 1, 0)
