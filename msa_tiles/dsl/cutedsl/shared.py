"""Shared memory and barriers as a table (msa_tiles.dsl.table) says."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.table import TableError


def make_buffers(table, memory: SmemAllocator, layouts: dict) -> dict:
    """The table's buffers as tensors, by name.

    A layout for those that are not laid out plainly, their first dim running fastest: it may be swizzled, and holds as
    many elements as the table says.
    """
    unknown = ", ".join(layouts.keys() - table.buffers.keys())
    if unknown:
        raise TableError(f"the table has no buffer {unknown}")
    found = {}
    for name, buffer in table.buffers.items():
        element = ELEMENTS[buffer.element]
        layout = layouts.get(name, cute.make_layout(tuple(buffer.dims.values())))
        swizzle = None
        if isinstance(layout, cute.ComposedLayout):
            layout, swizzle = layout.outer, layout.inner
        size = cute.cosize(layout) * element.width // 8
        if size != buffer.bytes:
            raise TableError(f"{name} takes {size} bytes, the table says {buffer.bytes}")
        found[name] = memory.allocate_tensor(element, layout, buffer.align, swizzle)
    return found


def by_rows(table, *names) -> dict:
    """Layouts of these buffers, their last dim running fastest."""
    shapes = {name: tuple(table.buffers[name].dims.values()) for name in names}
    return {name: cute.make_ordered_layout(s, order=tuple(reversed(range(len(s))))) for name, s in shapes.items()}


def barriers_of(table, first) -> dict:
    """Pointers to the first barrier of every name (`<pipeline>_full`, `<pipeline>_free`)."""
    return {name: first + table.place(name) for name, _ in table.barriers}


@cute.jit
def make_barriers(table: cutlass.Constexpr, memory: SmemAllocator, atoms: tuple):
    """A pointer to the first of the table's barriers, ready for all threads on return; all of them must call it.

    Fetches the descriptors of the copy atoms meanwhile.
    """
    first = memory.allocate_array(Int64, len(table.barriers))
    if cute.arch.thread_idx()[0] == 0:
        for i in cutlass.range_constexpr(len(table.barriers)):
            cute.arch.mbarrier_init(first + i, table.barriers[i][1])
        cute.arch.mbarrier_init_fence()
        for i in cutlass.range_constexpr(len(atoms)):
            cpasync.prefetch_descriptor(atoms[i])
    cute.arch.sync_threads()
    return first
