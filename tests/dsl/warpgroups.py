"""Stand-ins for what SM90 kernels do as warpgroups, over `warps`: products, TMA of blocks, accumulators in registers.

Products read their operands, registers too, when they complete, which is as late as their waits allow, each warp's for
itself. A warp of n lanes has n / 2 rows of a tile.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from warps import Arch, Array, Machine, Pointer

POISON = 10**6


class Chip(Machine, Arch):
    """A machine whose lanes know each other's registers, as products of a warp do."""

    def __init__(self, groups: int, warps: int, lanes: int, seed: int) -> None:
        Machine.__init__(self, warps=groups * warps, lanes=lanes, seed=seed)
        self.machine = self
        self.group_warps = warps  # of a warpgroup
        self.allocated: list[Any] = []
        self.registers: dict[tuple[int, int], list[Any]] = {}

    def fragment(self, columns: int) -> Fragment:
        """Registers of this lane, which have the same number in all lanes of a warp."""
        number = self.local.__dict__.setdefault("fragments", 0)
        self.local.fragments += 1
        held = self.registers.setdefault((self.warp, number), [None] * self.lanes)
        held[self.lane] = Fragment(np.full((2, 2, columns // 8), np.nan), number)
        return held[self.lane]

    def barrier(self, barrier_id: int, number_of_threads: int) -> None:
        self.meet(("barrier", barrier_id), number_of_threads)


class Fragment(Array):
    """Registers of one lane of an accumulator's tile: [column, half, j]; or of an operand's, in the same order."""

    def __init__(self, values: np.ndarray, number: int = -1) -> None:
        super().__init__(values)
        self.number = number

    def _place(self, index: Any) -> Any:
        if isinstance(index, int):
            return index % 2, index // 2 % 2, index // 4
        (column, half, j), _, _ = index
        return tuple(slice(None) if i is None else i for i in (column, half, j))

    def __getitem__(self, index: Any) -> Any:
        found = self.values[self._place(index)]
        return Array(found) if isinstance(found, np.ndarray) else found.item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[self._place(index)] = value


class Pairs:
    """Registers of an operand by twos: number 2j + half holds both columns."""

    def __init__(self, fragment: Fragment) -> None:
        self.values = fragment.values

    def __getitem__(self, number: int) -> Pair:
        return Pair(*self.values[:, number % 2, number // 2].tolist())

    def __setitem__(self, number: int, pair: Pair) -> None:
        self.values[:, number % 2, number // 2] = pair.low, pair.high

    def fill(self, value: int) -> None:
        assert value == 0, "other bits are no pair of equal numbers"
        self.values[...] = 0.0


class Pair:
    """Two numbers in one, of which shifts and masks keep one."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __lshift__(self, _places: int) -> Any:
        return types.SimpleNamespace(bitcast=lambda _type: self.low)

    def __and__(self, _mask: int) -> Any:
        return types.SimpleNamespace(bitcast=lambda _type: self.high)


class Memory:
    """Every lane gets the same things in the same order."""

    def __init__(self, chip: Chip) -> None:
        self.chip, self.count = chip, 0

    def _next(self, make: Callable[[], Any]) -> Any:
        if self.count == len(self.chip.allocated):
            self.chip.allocated.append(make())
        self.count += 1
        return self.chip.allocated[self.count - 1]

    def allocate_tensor(self, element: Any, shape: Any, _alignment: int, _swizzle: Any = None) -> Array:
        integer = element is int
        return self._next(lambda: Array(np.full(shape, POISON if integer else np.nan, dtype=int if integer else float)))

    def allocate_array(self, _element: Any, _count: int) -> Pointer:
        return self._next(lambda: Pointer("barriers"))


class Operand:
    """A matrix in shared memory, read when a product completes; its last index is the tile's."""

    def __init__(self, read: Callable[..., np.ndarray]) -> None:
        self.read = read

    def __getitem__(self, index: tuple[Any, ...]) -> Operand:
        return Operand(lambda: self.read(index[-1]))


def tiles(array: Array) -> Operand:
    return Operand(lambda tile: array.values[:, :, tile])


class Multiplications:
    """What the kernel calls `wgmma`; every product is left times the transposed right."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def product(self, _element: Any, columns: int, _major: Any, _source: Any) -> Any:
        mma = types.SimpleNamespace(partition_shape_A=lambda shape: ("operand", shape[1]))
        return Product(mma, columns, False), Product(mma, columns, True)

    def operand_a(self, _products: Any, tensor: Any) -> Operand:
        return tensor if isinstance(tensor, Operand) else tiles(tensor)

    operand_b = operand_a

    def accumulator(self, _products: Any, columns: int) -> Fragment:
        return self.chip.fragment(columns)

    def multiply(self, products: Any, into: Fragment, left: Any, right: Operand) -> None:
        chip, member, warp_rows = self.chip, self.chip.warp % self.chip.group_warps, self.chip.lanes // 2
        target = chip.registers[chip.warp, into.number]
        source = None if isinstance(left, Operand) else chip.registers[chip.warp, left.number]

        def finish() -> None:
            rows = left.read()[member * warp_rows :][:warp_rows] if source is None else together(source)
            result = rows @ right.read().T
            if products[0].accumulates:
                result = result + together(target)
            apart(result, target)

        if chip.elected():
            chip.later(("products", chip.warp), finish)
        chip.sync_warp()

    def wait_group(self, left: int) -> None:
        queue = self.chip.queues.setdefault(("products", self.chip.warp), [])
        self.chip.wait(lambda: len(queue) <= left)


class Product(NamedTuple):
    mma: Any
    columns: int
    accumulates: bool

    def partition_shape_A(self, shape: tuple[int, int]) -> tuple[str, int]:
        return "operand", shape[1]


def together(fragments: list[Fragment]) -> np.ndarray:
    """The rows of a warp, [row, column], of what its lanes hold."""
    values = np.stack([fragment.values for fragment in fragments])  # [lane, column, half, j]
    lanes = values.reshape(-1, 4, *values.shape[1:])
    return lanes.transpose(3, 0, 4, 1, 2).reshape(len(fragments) // 2, -1)


def apart(rows: np.ndarray, fragments: list[Fragment]) -> None:
    """The way back."""
    lanes = rows.reshape(2, len(fragments) // 4, -1, 4, 2).transpose(1, 3, 4, 0, 2)
    for lane, fragment in enumerate(fragments):
        fragment.values[...] = lanes[lane // 4, lane % 4]


class Boxes:
    """Boxes, of which the kernel selects one by its last indices."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __getitem__(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.array, *index[-2:]


class Blocks:
    """Keys and values."""

    def __init__(self, chip: Chip, block_size: int, head_dim: int) -> None:
        self.chip, self.block_size, self.bytes = chip, block_size, block_size * head_dim * 2

    def boxes(self, block: Array) -> Array:
        return block

    def load(self, _atom: Any, source: Array, row: int, _pages: Any, head: int, block: Array, full: Pointer) -> None:
        def arrive() -> None:
            found = source.values[row : row + self.block_size, head]
            block.values[: len(found), :, 0] = found
            block.values[len(found) :] = 0.0
            self.chip.barriers[full.place].receive(self.bytes)

        if self.chip.elected():
            self.chip.mbarrier_arrive_and_expect_tx(full, self.bytes)
            self.chip.later(object(), arrive)

    def clear_rows(self, block: Array, first: int, thread: int, threads: int) -> None:
        for row in range(first + thread, self.block_size, threads):
            block.values[row] = 0.0


class Writing:
    """Tiles that warps write from their registers."""

    def __init__(self, chip: Chip, thread: int) -> None:
        self.warp_rows = chip.lanes // 2
        self.member, self.lane = thread // chip.lanes, thread % chip.lanes

    def partition_D(self, array: Array) -> Any:
        return Boxes(array)

    def retile(self, fragment: Fragment) -> Fragment:
        return fragment

    def copy(self, fragment: Fragment, target: tuple[Any, ...]) -> None:
        array, _, tile = target
        for half in range(2):
            row = self.member * self.warp_rows + self.lane // 4 + half * self.warp_rows // 2
            by_column = array.values[row, :, tile].reshape(-1, 4, 2)
            by_column[:, self.lane % 4] = fragment.values[:, half].T
