"""wgmma: reads its operands and writes its accumulator as late as wait_wgmma allows."""

from __future__ import annotations

from typing import Any

import numpy as np

from msa_tiles.simulator.boxes import Box, team
from msa_tiles.simulator.errors import UnsupportedError
from msa_tiles.simulator.frame import Frame
from msa_tiles.simulator.memory import Fragment
from msa_tiles.simulator.shared import SharedMemory

WARPGROUP = 4


class Wgmma:
    """One issued product C = A B, or C += A B; a commit group of its own."""

    def __init__(self, frame: Frame, a: Box, b: Box, c: Box, transpose_a: bool, transpose_b: bool, clear: bool) -> None:
        warps = frame.whole_warps("wgmma")
        if len(warps) % WARPGROUP or warps[0] % WARPGROUP:
            raise UnsupportedError(f"wgmma by {len(warps)} warps: wanted whole warpgroups")
        if not isinstance(c.memory, Fragment) or not isinstance(b.memory, SharedMemory):
            raise UnsupportedError(f"wgmma {a.memory.name} x {b.memory.name} -> {c.memory.name}: wrong kinds of memory")
        order = frame.cta.order
        self.knows = order.knowledge(team(frame, "wgmma"))
        self.a, self.b, self.c = a, b, c
        self.transposed = transpose_a, transpose_b
        self.clear = clear
        self.accumulator, self.old = c.memory, None
        self._take_accumulator(frame)
        for operand in (a, b):
            self._check_operand(frame, operand)

    def _take_accumulator(self, frame: Frame) -> None:
        memory = self.accumulator
        memory.own(frame)
        if memory.multiplying:
            memory.may_write()
        if not self.clear and not memory.accumulating:
            memory.must_be_written(memory.complete or memory.written[self.c.slices])
        memory.accumulating += 1

    def _check_operand(self, frame: Frame, operand: Box) -> None:
        memory = operand.memory
        if isinstance(memory, SharedMemory):
            places = operand.places
            # What is not in order is poison, see _operand: its product may still be thrown away.
            ordered = places[~memory.unordered(places, self.knows)]
            memory.check_published(ordered, self.knows, "a wgmma operand")
        elif isinstance(memory, Fragment):
            memory.own(frame)
            memory.may_read()
            memory.must_be_written(memory.complete or memory.written[operand.slices])
            memory.multiplying += 1
        else:
            raise UnsupportedError(f"wgmma operand {memory.name} in global memory")

    def retire(self) -> None:
        """Do the product now."""
        a, b = (self._operand(box) for box in (self.a, self.b))
        if self.transposed[0]:
            a = a.T
        if self.transposed[1]:
            b = b.T
        memory, where = self.accumulator, self.c.slices
        product = (a @ b).reshape(self.c.extent)
        memory.array[where] = product if self.clear else memory.array[where] + product
        memory.mark(where)
        memory.accumulating -= 1
        if isinstance(self.a.memory, Fragment):
            self.a.memory.multiplying -= 1

    def _operand(self, box: Box) -> np.ndarray:
        memory = box.memory
        shape = box.extent[-2:]
        if isinstance(memory, SharedMemory):
            places = box.places
            values: Any = memory.array[places].astype(np.float32)
            values[memory.unordered(places, self.knows)] = np.nan
            return values.reshape(shape)
        return memory.array[box.slices].reshape(shape).astype(np.float32)


def issue(frame: Frame, a: Box, b: Box, c: Box, transpose_a: bool, transpose_b: bool, clear: bool) -> None:
    """T.wgmma_gemm: start a product as a group of its own."""
    operation = Wgmma(frame, a, b, c, transpose_a, transpose_b, clear)
    if frame.cta.late:
        frame.role.wgmmas.append(operation)
    else:
        operation.retire()


def wait(frame: Frame, most: int) -> None:
    """T.wait_wgmma: retire the groups of the role until at most `most` are in flight."""
    frame.whole_warps("wait_wgmma")
    groups = frame.role.wgmmas
    while len(groups) > most:
        groups.pop(0).retire()
