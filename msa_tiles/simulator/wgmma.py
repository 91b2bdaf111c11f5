"""wgmma: reads its operands and writes its accumulator as late as wait_wgmma allows.

Products are summed in float32, whatever the operands: the tensor cores keep fewer bits of sums of e4m3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from msa_tiles.simulator.boxes import Box, row_agents, team
from msa_tiles.simulator.errors import UnsupportedError
from msa_tiles.simulator.frame import WARPGROUP, Frame
from msa_tiles.simulator.memory import Fragment
from msa_tiles.simulator.product import WatchedProduct
from msa_tiles.simulator.shared import SharedMemory

NEVER = np.iinfo(np.int32).max


class Wgmma(WatchedProduct):
    """One issued product C = A B, or C += A B; a commit group of its own."""

    hint = "what a wgmma of {agent} reads; the barrier between must come after wait_wgmma"

    def __init__(self, frame: Frame, a: Box, b: Box, c: Box, transpose_a: bool, transpose_b: bool, clear: bool) -> None:
        warps = frame.whole_warps("wgmma")
        if len(warps) % WARPGROUP or warps[0] % WARPGROUP:
            raise UnsupportedError(f"wgmma by {len(warps)} warps: wanted whole warpgroups")
        if not isinstance(c.memory, Fragment) or not isinstance(b.memory, SharedMemory):
            raise UnsupportedError(f"wgmma {a.memory.name} x {b.memory.name} -> {c.memory.name}: wrong kinds of memory")
        if a.memory.dtype != b.memory.dtype:
            raise UnsupportedError(f"wgmma {a.memory.dtype} x {b.memory.dtype}: wanted operands of one type")
        if b.memory.dtype.itemsize == 1 and (transpose_a or not transpose_b):
            raise UnsupportedError(f"wgmma of {b.memory.dtype}: wanted both operands with K along their rows")
        self.order = frame.cta.order
        self.team = team(frame, "wgmma")
        self.knows = self.order.knowledge(self.team)
        self.a, self.b, self.c = a, b, c
        self.transposed = transpose_a, transpose_b
        self.clear = clear
        self.accumulator = c.memory
        self._retired: np.ndarray | None = None
        self._take_accumulator(frame)
        # A warp multiplies its own rows of A, and all of B.
        rows = None if transpose_a else row_agents(frame, a.extent[-2])
        self._check_operand(frame, a, self.team if rows is None else np.repeat(rows, a.extent[-1]))
        self._check_operand(frame, b, self.team)

    def _take_accumulator(self, frame: Frame) -> None:
        memory = self.accumulator
        memory.own(frame)
        if memory.multiplying:
            memory.may_write()
        if not self.clear and not memory.accumulating:
            memory.must_be_written(memory.complete or memory.written[self.c.slices])
        memory.accumulating += 1

    def _check_operand(self, frame: Frame, operand: Box, agents: Any) -> None:
        memory = operand.memory
        if isinstance(memory, SharedMemory):
            places = operand.places
            # What is not in order is poison, see _operand: its product may still be thrown away.
            ordered = places[~memory.unordered(places, self.knows)]
            memory.check_published(ordered, self.knows, "a wgmma operand")
            memory.note_product(self, places, agents)
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
        # Not numpy's: its threads cost more than tiles of this size.
        product = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy().reshape(self.c.extent)
        memory.array[where] = product if self.clear else memory.array[where] + product
        memory.mark(where)
        memory.accumulating -= 1
        memory.products = [self] if self.clear else [*memory.products, self]
        self._retired = self.order.clock.copy()
        if isinstance(self.a.memory, Fragment):
            self.a.memory.multiplying -= 1

    def retired_at(self, agent: int) -> int:
        """The clock of an agent when this was over."""
        return NEVER if self._retired is None else int(self._retired[agent])

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
