"""A simulator for TileLang kernels: it runs a PrimFunc on the CPU, before lowering, and checks how it synchronises.

    simulate(kernel_factory(head_dim=64, ...), *tensors_and_numbers, seed=0)

The arguments are those of the compiled kernel: CPU tensors of any strides, written in place, and numbers. A kernel that
does something undefined, or that the simulator does not know, raises a `SimulationError` which names the statement,
the threads and the CTA; nothing is skipped. The library itself does not import this package.

What it models
    Threads     Warps run apart, in an order that the seed shuffles; a role (all warps that no branch on the thread
                number divides) runs as one coroutine in a kernel with tile operations, every warp in one without.
                Threads of a warp that diverge are masked. Shuffles, sync_warp and barriers want whole warps. CTAs run
                side by side, a few at a time, in shuffled order. Atomics are served in shuffled order.
    mbarriers   Arrival counts, phases, parities, and the bytes of TMA loads. Too many arrivals are an error, and when
                every thread waits, the report lists who waits for what.
                bar.sync with an id: a role's warps come together here and one by one on a GPU, so a warp that may come
                while others still meet under that id is an error.
    TMA         A load's target holds poison until the load lands, which it does when nobody can go on without it
                (now and then at once: a phase that completes too early is a fault, too). Boxes outside the tensor are
                zero on load and dropped on store. A store reads its source when tma_store_wait makes it, and reaches
                global memory in any order. Addresses, strides and boxes obey the hardware's limits.
    wgmma       Reads its operands and writes its accumulator when wait_wgmma makes it. Until then the accumulator and
                an operand in registers are out of bounds for everybody. An operand that is not in order is NaN.
    tcgen05     Products are done in order, as late as the barriers to which they are committed allow; who passes one
                knows that all before it are done. Reading an accumulator, writing over one that others read, and
                changing an operand want such a barrier. One warp issues; a warpgroup reads, warp i the lanes from
                32 i on. Warp 0 gives tensor memory back at its end, when all products and reads must be known to it.
    Order       Every access of shared memory is checked against vector clocks: two accesses of an element, one of them
                a write, must be separated by a barrier that both sides pass (or by sync_warp inside a warp), whether
                or not this run's order of events made them collide. A wgmma whose operand is overwritten without
                such a barrier is an error as soon as its result is used; a result that is dropped may be garbage.
    Proxies     Ordinary stores to shared memory reach TMA and wgmma only after a fence_proxy_async of the warps that
                stored, and then a barrier.
    Grids       Tensors that the kernel before still works on are out of bounds for a warp until it passes pdl_sync.
    Memory      Uninitialised shared memory and fragments are errors when read (operands of wgmma are NaN), private
                variables hold poison. Indices outside a buffer, gaps of strided tensors and misaligned 128-bit
                accesses are errors, and so are extents and strides that the kernel's integers do not hold. Integers
                wrap, bfloat16 rounds, fmax and fmin drop NaN as on the device.

What it cannot see
    Layouts, swizzles, bank conflicts, descriptors, register pressure and whatever lowering and nvcc do; fences of
    tcgen05, most of which lowering adds, and how many columns of tensor memory there are. Barriers that TileLang would
    insert itself are not inserted: kernels are expected to set tl.disable_thread_storage_sync.
    Races in global memory, except threads of one statement that store different values to one element; ordering of
    global memory between CTAs. Which warp owns which row is known for 64-row tiles of one warpgroup (warp i owns the
    rows 16i to 16i+15, of fragments and of the A operand) and for tiles read from tensor memory; other parallel loops
    and copies count as done by all warps of the role together. Inside a warp, order is tracked by the last access of
    each element. A lane that arrives alone on an mbarrier speaks for its warp. Exited threads do not count in
    sync_threads. T.copy is done when it returns, also where lowering would turn it into an asynchronous copy. Speed of
    any kind.

Where things are
    kernel      takes a PrimFunc apart and runs its grid        scheduler  coroutines, landings, deadlocks
    statements, expressions, intrinsics, operations             TIR to Python closures; new constructs go here
    frame       threads that run together                       roles      which threads are one coroutine
    memory, shared, lanes, order                                buffers, and who did what when
    boxes, tma, wgmma, tensor, barriers                         tile operations and asynchronous work

It knows the IR of the TileLang version that the package pins.
"""

from msa_tiles.simulator.errors import (
    ArgumentError,
    BarrierError,
    DeadlockError,
    DivergenceError,
    InFlightError,
    OutOfBoundsError,
    ProxyFenceError,
    RaceError,
    SimulationError,
    UninitialisedError,
    UnsupportedError,
)
from msa_tiles.simulator.kernel import simulate

__all__ = [
    "ArgumentError",
    "BarrierError",
    "DeadlockError",
    "DivergenceError",
    "InFlightError",
    "OutOfBoundsError",
    "ProxyFenceError",
    "RaceError",
    "SimulationError",
    "UninitialisedError",
    "UnsupportedError",
    "simulate",
]
