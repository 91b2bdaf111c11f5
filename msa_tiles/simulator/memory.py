"""Global memory, and what threads keep in registers: private variables and fragments.

``load`` and ``store`` take a frame and one index a dimension; an index is a Python int, or an array over the frame's
lanes. Shared memory is in `shared`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from msa_tiles.simulator.dtypes import bits, poisoned, scalar
from msa_tiles.simulator.errors import (
    DivergenceError,
    InFlightError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
)
from msa_tiles.simulator.frame import Frame

Index = Sequence[Any]


def inside(frame: Frame, index: Index, shape: tuple[int, ...], name: str) -> tuple[list[Any], bool]:
    """The index with the places of inactive lanes made harmless, and whether it is the same for all lanes.

    Raises OutOfBoundsError for an active lane.
    """
    same = True
    checked: list[Any] = []
    for dim, (i, extent) in enumerate(zip(index, shape, strict=True)):
        if isinstance(i, np.ndarray):
            same = False
            # As unsigned numbers those below zero are past every extent.
            wild = i.view(np.uint32) >= extent if i.dtype == np.int32 else (i < 0) | (i >= extent)
            if np.count_nonzero(wild):
                bad = wild if frame.mask is None else wild & frame.mask
                if bad.any():
                    first = np.broadcast_to(i, bad.shape)[bad].flat[0]
                    raise OutOfBoundsError(f"{name}: index {first} in dimension {dim} of extent {extent}")
                i = np.where(wild, 0, i)
        elif not 0 <= i < extent:
            raise OutOfBoundsError(f"{name}: index {i} in dimension {dim} of extent {extent}")
        checked.append(i)
    return checked, same


def active_lanes(frame: Frame, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Each value as a flat array over the active lanes."""
    if frame.mask is None:
        count = math.prod(frame.shape)
        return [_spread(a, frame.shape).reshape(-1) if isinstance(a, np.ndarray) else np.full(count, a) for a in arrays]
    mask = _spread(frame.mask, frame.shape)
    count = int(np.count_nonzero(mask))
    return [_spread(a, frame.shape)[mask] if isinstance(a, np.ndarray) else np.full(count, a) for a in arrays]


def _spread(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return array if array.shape == shape else np.broadcast_to(array, shape)


def scatter(array: np.ndarray, where: tuple[np.ndarray, ...], values: np.ndarray, name: str) -> None:
    """Store lane by lane; lanes that meet in one element must agree.

    Raises RaceError.
    """
    values = values.astype(array.dtype)
    array[where] = values
    lost = bits(array[where]) != bits(values)
    if lost.any():
        raise RaceError(f"{name}: threads store different values to one element, {values[lost].flat[0]} among them")


class GlobalMemory:
    """A tensor argument.

    ``awaited``: the kernel before works on it until pdl_sync returns. ``cut``: why the kernel would look for it
    elsewhere, if its integers do not hold the tensor's extents and strides.
    """

    def __init__(self, name: str, array: np.ndarray, address: int) -> None:
        self.name, self.array, self.shape, self.dtype = name, array, array.shape, array.dtype
        self.address = address
        self.awaited = False
        self.cut = ""
        self._offsets: tuple[np.ndarray, np.ndarray] | None = None

    def reach(self, frame: Frame) -> None:
        """The threads of a frame are about to access the tensor.

        Raises RaceError, OutOfBoundsError.
        """
        if self.cut:
            raise OutOfBoundsError(f"{self.name}: {self.cut}")
        if self.awaited and not frame.cta.synced.issuperset(frame.warps.tolist()):
            raise RaceError(f"{self.name}: accessed before pdl_sync, and the kernel before may not be done with it")

    def load(self, frame: Frame, index: Index) -> Any:
        self.reach(frame)
        checked, same = inside(frame, index, self.shape, self.name)
        value = self.array[tuple(checked)]
        return scalar(value) if same else value

    def store(self, frame: Frame, index: Index, value: Any) -> None:
        self.reach(frame)
        checked, same = inside(frame, index, self.shape, self.name)
        if same and not isinstance(value, np.ndarray):
            self.array[tuple(checked)] = value
        else:
            *where, values = active_lanes(frame, [*checked, value])
            scatter(self.array, tuple(where), values, self.name)

    def places(self, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
        """Indices of raw element offsets from the base address; offsets in the gaps of a strided tensor are outside.

        Raises OutOfBoundsError.
        """
        if self._offsets is None:
            steps = [stride // self.dtype.itemsize for stride in self.array.strides]
            at = sum(np.arange(n).reshape([-1] + [1] * (self.array.ndim - d - 1)) * steps[d]
                     for d, n in enumerate(self.shape))  # fmt: skip
            flat = np.broadcast_to(np.asarray(at), self.shape).reshape(-1)
            order = np.argsort(flat, kind="stable")
            self._offsets = flat[order], order
        known, order = self._offsets
        if not len(known):
            raise OutOfBoundsError(f"{self.name}: element offset {offsets.flat[0]} is not in an empty tensor")
        near = np.minimum(np.searchsorted(known, offsets), len(known) - 1)
        wild = known[near] != offsets
        if wild.any():
            raise OutOfBoundsError(f"{self.name}: element offset {offsets[wild].flat[0]} is not in the tensor")
        return np.unravel_index(order[near], self.shape)


class LocalMemory:
    """A private variable or array of each thread of a role.

    An element that all threads set to one value is kept as that scalar, so that control flow stays cheap.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], threads: int) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        size = int(np.prod(shape))
        self.array = poisoned((size, threads), dtype)
        self.common: list[Any] = [None] * size

    def load(self, frame: Frame, index: Index) -> Any:
        checked, same = self._inside(frame, index)
        if same:
            place = self._flat(checked)
            value = self.common[place]
            if value is not None:
                return value
            row = self.array[place]
            return row if frame.lanes is None else row[frame.lanes]
        self._spread_all()
        lanes = np.arange(self.array.shape[1]) if frame.lanes is None else frame.lanes
        return self.array[self._flat(checked), lanes]

    def store(self, frame: Frame, index: Index, value: Any) -> None:
        checked, same = self._inside(frame, index)
        if not same:
            self._spread_all()
            lanes = np.arange(self.array.shape[1]) if frame.lanes is None else frame.lanes
            place, lanes, values = active_lanes(frame, [self._flat(checked), lanes, value])
            self.array[place, lanes] = values
            return
        place = self._flat(checked)
        if frame.lanes is None and frame.mask is None:
            if isinstance(value, np.ndarray):
                self.array[place] = value
                self.common[place] = None
            else:
                self.common[place] = value
            return
        self._spread(place)
        row = self.array[place]
        if frame.lanes is None:
            np.copyto(row, value, where=frame.mask, casting="unsafe")
        else:
            lanes = frame.lanes if frame.mask is None else frame.lanes[frame.mask]
            row[lanes] = value[frame.mask] if isinstance(value, np.ndarray) and frame.mask is not None else value

    def _inside(self, frame: Frame, index: Index) -> tuple[Index, bool]:
        """As `inside`; a variable's only element, or a literal place of an array, takes the short way."""
        if len(index) == 1 and type(index[0]) is int and 0 <= index[0] < self.shape[0]:
            return index, True
        return inside(frame, index, self.shape, self.name)

    def _flat(self, index: Index) -> Any:
        place = index[0]
        for i, extent in zip(index[1:], self.shape[1:], strict=True):
            place = place * extent + i
        return place

    def _spread(self, place: int) -> None:
        if self.common[place] is not None:
            self.array[place] = self.common[place]
            self.common[place] = None

    def _spread_all(self) -> None:
        for place in range(len(self.common)):
            self._spread(place)


class Fragment:
    """A tile in the registers of the threads of one role.

    While a wgmma is in flight nobody may touch its accumulator, nor write its A operand.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.array = poisoned(shape, dtype)
        self.written = np.zeros(shape, bool)
        self.complete = False
        self.accumulating = 0
        self.multiplying = 0
        self.products: list[Any] = []  # the wgmmas whose sum this is
        self.role: Any = None

    def load(self, frame: Frame, index: Index) -> Any:
        self.own(frame)
        self.may_read()
        self.use()
        checked, same = inside(frame, index, self.shape, self.name)
        where = tuple(checked)
        if not self.complete:
            known = self.written[where]
            self.must_be_written(known if frame.mask is None else known | ~frame.mask)
        value = self.array[where]
        return scalar(value) if same else value

    def store(self, frame: Frame, index: Index, value: Any) -> None:
        self.own(frame)
        self.may_write()
        checked, same = inside(frame, index, self.shape, self.name)
        if same and not isinstance(value, np.ndarray):
            where: tuple[Any, ...] = tuple(checked)
            self.array[where] = value
        else:
            *places, values = active_lanes(frame, [*checked, value])
            where = tuple(places)
            scatter(self.array, where, values, self.name)
            if values.size == self.array.size:
                self.products = []
        self.mark(where)

    def mark(self, where: Any) -> None:
        """Note that these elements hold something."""
        if not self.complete:
            self.written[where] = True
            self.complete = bool(self.written.all())

    def own(self, frame: Frame) -> None:
        """A fragment belongs to the threads that use it first; others have registers of their own."""
        if self.role is None:
            self.role = frame.role
        elif self.role is not frame.role:
            raise DivergenceError(f"{self.name}: {frame.role.name} use a fragment of {self.role.name}")

    def use(self) -> None:
        """Somebody looks at the value, so the wgmmas that made it must have been right.

        Raises RaceError.
        """
        for product in self.products:
            product.use()

    def may_read(self) -> None:
        """Raises InFlightError."""
        if self.accumulating:
            raise InFlightError(f"{self.name}: touched while a wgmma accumulates into it; wait_wgmma comes first")

    def may_write(self) -> None:
        """Raises InFlightError."""
        self.may_read()
        if self.multiplying:
            raise InFlightError(f"{self.name}: overwritten while a wgmma reads it; wait_wgmma comes first")

    def must_be_written(self, known: Any) -> None:
        """Raises UninitialisedError."""
        if not np.all(known):
            raise UninitialisedError(f"{self.name}: read before it was written")
