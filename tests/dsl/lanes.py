"""Runs CuTe DSL device code on the CPU, thread by thread, with a stand-in for the DSL: what warps work out together.

`load(file)` reads a kernel or a helper as plain Python, and `launch` runs a function in every thread of a grid. Threads
take turns: one runs until it meets others in a shuffle, a vote or a barrier. All threads that meet must ask for the
same thing, shared memory and registers hold nothing until they are written, and every index is checked, so divergence,
uninitialised reads and accesses out of bounds fail. So do accesses to shared memory by two threads, one of which writes
something else, without a barrier of theirs in between; shuffles and votes order nothing. Tensor cores, TMA and
mbarriers are not here.
"""

from __future__ import annotations

import builtins
import collections
import itertools
import math
import operator
import struct
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor as TorchTensor
from warps import held

from msa_tiles.sources import PACKAGE

WARP = 32
HELPERS = "msa_tiles.dsl.cutedsl."


class Int32(int):
    """An int that wraps at 32 bits."""

    width = 32

    def __new__(cls, value: Any = 0) -> Int32:
        return super().__new__(cls, (int(value) + (1 << 31)) % (1 << 32) - (1 << 31))

    def bitcast(self, to: type) -> Any:
        return to(struct.unpack("f", struct.pack("i", self))[0])

    def __lshift__(self, places: int) -> Int32:
        return Int32(int(self) << places) if 0 <= places < 32 else Int32(0)

    def __rshift__(self, places: int) -> Int32:
        return Int32(int(self) >> places) if 0 <= places < 32 else Int32(-1 if self < 0 else 0)

    def __invert__(self) -> Int32:
        return Int32(~int(self))

    def __neg__(self) -> Int32:
        return Int32(-int(self))


def _wrap(name: str) -> None:
    plain = getattr(operator, name.strip("_") + ("_" if name in ("__and__", "__or__") else ""))
    setattr(Int32, name, lambda self, other: Int32(plain(int(self), int(other))))
    setattr(Int32, f"__r{name[2:]}", lambda self, other: Int32(plain(int(other), int(self))))


for _name in ("__add__", "__sub__", "__mul__", "__floordiv__", "__mod__", "__and__", "__or__", "__xor__"):
    _wrap(_name)


class Uint32(int):
    def __new__(cls, value: Any) -> Uint32:
        return super().__new__(cls, int(value) % (1 << 32))

    def __rshift__(self, places: int) -> Uint32:
        return Uint32(int(self) >> int(places))


class Float32(float):
    """A float rounded to single precision; an operation that has no answer gives the positive NaN of the GPU."""

    width = 32

    def __new__(cls, value: Any) -> Float32:
        value = float(value)
        return super().__new__(cls, math.nan if math.isnan(value) else struct.unpack("f", struct.pack("f", value))[0])

    def bitcast(self, to: type) -> Any:
        return to(0x7FFFFFFF if math.isnan(self) else struct.unpack("i", struct.pack("f", self))[0])

    def __sub__(self, other: float) -> Float32:
        return Float32(float(self) - float(other))

    def __neg__(self) -> Float32:
        return Float32(-float(self))

    def __truediv__(self, other: float) -> Float32:
        return Float32(float(self) / float(other))


Float32.inf = Float32(math.inf)  # type: ignore[attr-defined]
Float32.nan = Float32(math.nan)  # type: ignore[attr-defined]


class Memory(list):
    """Elements in a row; None where nothing was written."""


class _Access(NamedTuple):
    """Who, and behind how many barriers of the CTA and of its warp."""

    thread: int
    barriers: int
    warp_barriers: int

    def before(self, later: _Access) -> bool:
        """Is this access over when the other one begins, however threads are scheduled?"""
        if self.thread == later.thread or self.barriers < later.barriers:
            return True
        return self.thread // WARP == later.thread // WARP and self.warp_barriers < later.warp_barriers


class SharedMemory(Memory):
    """Memory that knows who was where last."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__(values)
        self.written: dict[int, _Access] = {}
        self.read: dict[int, dict[int, _Access]] = collections.defaultdict(dict)

    def __getitem__(self, place: Any) -> Any:
        now = _access()
        if not self.written.get(place, now).before(now):
            raise RuntimeError(f"a read of what {self.written[place]} writes meanwhile, by {now}")
        self.read[place][now.thread] = now
        return super().__getitem__(place)

    def __setitem__(self, place: Any, value: Any) -> None:
        now = _access()
        if super().__getitem__(place) != value:
            others = [self.written.get(place, now), *self.read.pop(place, {}).values()]
            if not all(other.before(now) for other in others):
                raise RuntimeError(f"a write of what {others} read or write meanwhile, by {now}")
        self.written[place] = now
        super().__setitem__(place, value)


class Pointer:
    """A place in memory, which is its own address too."""

    memspace = None

    def __init__(self, memory: Memory, offset: int) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, places: int) -> Pointer:
        return Pointer(self.memory, self.offset + int(places))

    def toint(self) -> Pointer:
        return self


class Tensor:
    """A strided view of memory."""

    def __init__(self, memory: Memory, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.memory, self.offset, self.shape, self.stride = memory, offset, shape, stride

    element_type = SimpleNamespace(width=16)  # what is moved 16 bytes at a time has two bytes an element

    @property
    def iterator(self) -> Pointer:
        return Pointer(self.memory, self.offset)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, self.stride

    def __getitem__(self, place: Any) -> Any:
        places = place if isinstance(place, tuple) else (place,)
        if None in places:
            offset, shape, stride = self.offset, [], []
            for at, size, step in zip(places, self.shape, self.stride, strict=True):
                if at is None:
                    shape.append(size)
                    stride.append(step)
                else:
                    offset += int(at) * step
            return Tensor(self.memory, offset, tuple(shape), tuple(stride))
        value = self.memory[self._index(places)]
        if value is None:
            raise RuntimeError("a read of what was never written")
        return value

    def __setitem__(self, place: Any, value: Any) -> None:
        self.memory[self._index(place if isinstance(place, tuple) else (place,))] = value

    def fill(self, value: Any) -> None:
        for places in itertools.product(*map(range, self.shape)):
            self[places] = value

    def load(self) -> Tensor:
        return self

    def to(self, _element: Any) -> Tensor:
        return self

    def store(self, other: Tensor) -> None:
        copy(None, other, self)

    def _index(self, places: tuple[Any, ...]) -> int:
        if len(places) == 1 < len(self.shape):  # a plain number counts along the first mode first
            left, places = int(places[0]), ()
            for size in self.shape:
                left, at = divmod(left, size)
                places = (*places, at)
        offset = self.offset
        for at, size, step in zip(places, self.shape, self.stride, strict=True):
            if not 0 <= at < size:
                raise IndexError(f"{places} is outside of {self.shape}")
            offset += int(at) * step
        return offset


def tensor_of(values: TorchTensor) -> Tensor:
    """A copy of a tensor for device code, with its shape."""
    kind = Float32 if values.is_floating_point() else Int32
    plain = values.contiguous()
    return Tensor(Memory(kind(x) for x in plain.flatten().tolist()), 0, tuple(plain.shape), plain.stride())


def laid_out(values: TorchTensor, order: Sequence[int]) -> Tensor:
    """A copy of a tensor for device code, its dimensions in memory in this order, from the slowest to the fastest."""
    laid = tensor_of(values.permute(*order))
    return Tensor(laid.memory, 0, tuple(values.shape), tuple(laid.stride[order.index(d)] for d in range(values.dim())))


def lengths_of(module: types.ModuleType, where: Mapping[str, TorchTensor]) -> Any:
    """The kernel's `Lengths`: tensors that a call has, stand-ins and flags for those that it lacks."""
    nothing = torch.empty(0, dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "q_positions")
    return module.Lengths(
        *(tensor_of(where.get(name, nothing)) for name in names), *(Int32(name in where) for name in names[2:])
    )


def plant(fault: tuple[str, str], file: Path, folder: Path) -> Path:
    """A copy of a kernel's file with one text in the place of another, which must be there."""
    right, wrong = fault
    text = file.read_text(encoding="utf-8")
    assert right in text
    planted = folder / file.name
    planted.write_text(text.replace(right, wrong), encoding="utf-8")
    return planted


def _compact(shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = shape if isinstance(shape, tuple) else (shape,)
    if shape and isinstance(shape[0], tuple):  # a layout already
        return shape  # type: ignore[return-value]
    stride, step = [], 1
    for size in shape:
        stride.append(step)
        step *= size
    return shape, tuple(stride)


def empty(layout: Any, _element: Any = None) -> Tensor:
    """Memory that nobody wrote yet."""
    shape, stride = _compact(layout)
    return Tensor(Memory([None] * math.prod(shape)), 0, shape, stride)


def copy(_atom: Any, source: Tensor, target: Tensor) -> None:
    """Element by element; both sides have one mode."""
    for i in range(target.shape[0]):
        target[i] = source[i]


class _Meeting:
    """What the threads of a group bring to the place where they meet."""

    def __init__(self, size: int) -> None:
        self.names: set[str] = set()
        self.values: list[Any] = [None] * size
        self.here: list[_Thread] = []


class _Group:
    """Threads that meet: a warp or a CTA."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meetings: dict[int, _Meeting] = {}


class _Thread:
    """One thread of a CTA."""

    def __init__(self, cta: _Cta, index: int) -> None:
        self.cta, self.index, self.lane = cta, index, index % WARP
        self.turn = held()
        self.met = {False: 0, True: 0}
        self.passed = {False: 0, True: 0}
        self.access = _Access(index, 0, 0)  # what it would be now
        self.allocations = 0

    def barrier(self, whole: bool) -> None:
        """Wait for all threads of the warp (or CTA), and see what they wrote."""
        self.meet("barrier" if whole else "warp barrier", whole=whole)
        self.passed[whole] += 1
        self.access = _Access(self.index, self.passed[True], self.passed[False])

    def meet(self, name: str, value: Any = None, whole: bool = False) -> list[Any]:
        """The values of all threads of the warp (or CTA), once each has come here."""
        group = self.cta.group if whole else self.cta.warps[self.index // WARP]
        number = self.met[whole]
        self.met[whole] += 1
        if (meeting := group.meetings.get(number)) is None:
            meeting = group.meetings[number] = _Meeting(group.size)
        meeting.names.add(name)
        meeting.values[self.index % group.size] = value
        if len(meeting.here) + 1 < group.size:
            meeting.here.append(self)
            self.cta.wait(self)
        else:
            del group.meetings[number]
            self.cta.ready.extend(meeting.here)
        if len(meeting.names) > 1:
            raise RuntimeError(f"threads that meet ask for {sorted(meeting.names)}")
        return meeting.values


class _Cta:
    """Threads that take turns, and their shared memory."""

    def __init__(self, threads: int, block: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.block, self.grid = block, grid
        self.group = _Group(threads)
        self.warps = [_Group(WARP) for _ in range(threads // WARP)]
        self.shared: list[Tensor] = []
        self.threads = [_Thread(self, index) for index in range(threads)]
        self.ready = collections.deque(self.threads)
        self.left = threads
        self.error: BaseException | None = None
        self.done = held()

    def run(self, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        workers = [
            threading.Thread(target=self._work, args=(thread, function, arguments), daemon=True)
            for thread in self.threads
        ]
        for worker in workers:
            worker.start()
        self.ready.popleft().turn.release()
        self.done.acquire()
        for thread in self.threads:  # those that still wait after an error see it and end
            thread.turn.release()
        for worker in workers:
            worker.join()
        if self.error is not None:
            raise self.error

    def wait(self, thread: _Thread) -> None:
        """Let others run until this thread is ready again."""
        if not self.ready:
            raise RuntimeError("threads wait for others that never come")
        self.ready.popleft().turn.release()
        thread.turn.acquire()
        if self.error is not None:
            raise SystemExit

    def _work(self, thread: _Thread, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        thread.turn.acquire()
        _HERE.thread = thread
        if self.error is not None:
            return
        try:
            function(*arguments)
            self.left -= 1
            if self.left and not self.ready:
                raise RuntimeError("threads wait for others that never come")
        except SystemExit:
            return
        except BaseException as error:
            self.error = error
        if self.error is not None or not self.left:
            self.done.release()
        else:
            self.ready.popleft().turn.release()


_HERE = threading.local()


def launch(function: Callable[..., None], arguments: Sequence[Any], grid: tuple[int, ...], threads: int) -> None:
    """Run a function in every thread of every CTA of a grid, one CTA after another."""
    for number in range(math.prod(grid)):
        block, left = [], number
        for size in grid:
            left, at = divmod(left, size)
            block.append(Int32(at))
        while len(block) < 3:
            block.append(Int32(0))
        _Cta(threads, tuple(block), (*grid, 1, 1)[:3]).run(function, arguments)


def thread() -> int:
    """The number of the thread that runs, in its CTA."""
    return int(_HERE.thread.index)


def _access() -> _Access:
    return _HERE.thread.access  # type: ignore[no-any-return]


def _lane_values(name: str, value: Any, lane_of: Callable[[int], int]) -> Any:
    thread = _HERE.thread
    values = thread.meet(name, value)
    source = lane_of(thread.lane)
    return values[source] if 0 <= source < WARP else value


def _redux(value: Int32, kind: str) -> Int32:
    values = _HERE.thread.meet(f"redux {kind}", value)
    return Int32({"add": sum, "min": min, "max": max}[kind](map(int, values)))


def _ptx(text: str, write_only_types: Sequence[type] = (), read_only_args: Sequence[Any] = ()) -> Any:
    if text.startswith("shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, 1;"):
        number, bits = (int(x) % (1 << 32) for x in read_only_args)
        return Int32(bits << 1 | number >> 31)
    raise NotImplementedError(text)


def _fmax(a: Float32, b: Float32) -> Float32:
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def _ballot(condition: Any) -> int:
    return sum(bool(x) << i for i, x in enumerate(_HERE.thread.meet("ballot", condition)))


def _range(*bounds: Any, unroll: int = 0) -> Iterator[Int32]:
    return map(Int32, range(*map(int, bounds)))


def _ordered(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A layout whose mode of order 0 runs fastest."""
    stride = [math.prod(size for size, other in zip(shape, order, strict=True) if other < own) for own in order]
    return shape, tuple(stride)


class Allocator:
    """Hands out the CTA's shared memory, the same to every thread."""

    unwritten: Any = None  # what it holds at first

    def allocate_tensor(self, _element: Any, layout: Any, _alignment: int = 16, _swizzle: Any = None) -> Tensor:
        thread = _HERE.thread
        if thread.allocations == len(thread.cta.shared):
            shape, stride = _compact(layout)
            memory = SharedMemory([self.unwritten] * math.prod(shape))
            thread.cta.shared.append(Tensor(memory, 0, shape, stride))
        thread.allocations += 1
        return thread.cta.shared[thread.allocations - 1]


class _Anything(types.ModuleType):
    """A part of the DSL that is named but not run here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


def _stand_in() -> types.ModuleType:
    nvgpu = _Anything("nvgpu")
    nvgpu.CopyUniversalOp = lambda: None  # type: ignore[attr-defined]
    arch = _Anything("arch")
    here = _HERE
    for name, value in {
        "WARP_SIZE": WARP,
        "lane_idx": lambda: Int32(here.thread.lane),
        "warp_idx": lambda: Int32(here.thread.index // WARP),
        "thread_idx": lambda: (Int32(here.thread.index), Int32(0), Int32(0)),
        "block_idx": lambda: here.thread.cta.block,
        "grid_dim": lambda: tuple(map(Int32, here.thread.cta.grid)),
        "make_warp_uniform": lambda value: value,
        "shuffle_sync": lambda value, lane: _lane_values("shuffle", value, lambda _own: int(lane) % WARP),
        "shuffle_sync_up": lambda value, by: _lane_values("shuffle up", value, lambda own: own - by),
        "shuffle_sync_bfly": lambda value, by: _lane_values("shuffle across", value, lambda own: own ^ by),
        "vote_ballot_sync": _ballot,
        "vote_any_sync": lambda condition: any(here.thread.meet("vote", condition)),
        "warp_redux_sync": _redux,
        "sync_warp": lambda: here.thread.barrier(False),
        "sync_threads": lambda: here.thread.barrier(True),
        "popc": lambda bits: (int(bits) % (1 << 32)).bit_count(),
        "fmax": _fmax,
        "inline_ptx": _ptx,
        "griddepcontrol_wait": lambda: None,
        "griddepcontrol_launch_dependents": lambda: None,
    }.items():
        setattr(arch, name, value)
    cute = _Anything("cute")
    for name, value in {
        "arch": arch,
        "jit": lambda function: function,
        "kernel": lambda function: function,
        "make_layout": lambda shape, stride=None: _compact(shape) if stride is None else (shape, stride),
        "make_ordered_layout": _ordered,
        "ComposedLayout": type(None),
        "cosize": lambda layout: math.prod(_compact(layout)[0]),
        "make_rmem_tensor": empty,
        "make_tensor": lambda at, layout: Tensor(at.memory, at.offset, *_compact(layout)),
        "make_ptr": lambda _element, address, _memspace, assumed_align: address,
        "nvgpu": nvgpu,
        "make_copy_atom": lambda *_arguments, **_options: None,
        "copy": copy,
        "autovec_copy": lambda source, target: copy(None, source, target),
        "ceil_div": lambda number, by: Int32(-(-int(number) // int(by))),
        "size": lambda tensor, mode=None: math.prod(tensor.shape[m] for m in mode or range(len(tensor.shape))),
        "domain_offset": lambda at, tensor: Tensor(
            tensor.memory,
            tensor.offset + sum(int(a) * s for a, s in zip(at, tensor.stride, strict=True)),
            tuple(size - int(a) for a, size in zip(at, tensor.shape, strict=True)),
            tensor.stride,
        ),
    }.items():
        setattr(cute, name, value)
    cutlass = _Anything("cutlass")
    for name, value in {
        "cute": cute,
        "Int32": Int32,
        "Uint32": Uint32,
        "Int64": int,
        "Float32": Float32,
        "Boolean": bool,
        "range": _range,
        "range_constexpr": range,
        "const_expr": lambda value: value,
        "select_": lambda condition, value, other: value if condition else other,
        "min": min,
        "max": max,
    }.items():
        setattr(cutlass, name, value)
    memory = _Anything("memory")
    memory.SmemAllocator = Allocator  # type: ignore[attr-defined]
    cutlass.memory = memory  # type: ignore[attr-defined]
    return cutlass


_CUTLASS = _stand_in()
ARCH = _CUTLASS.cute.arch
_LOADED: dict[str, types.ModuleType] = {}


def _import(name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name == "cutlass" or name.startswith("cutlass."):
        if not fromlist:
            return _CUTLASS
        found: Any = _CUTLASS
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        return found
    if name == HELPERS.rstrip(".") or (name.startswith(HELPERS) and _file(name.removeprefix(HELPERS)) is None):
        package = name.removeprefix(HELPERS.rstrip(".")).removeprefix(".")
        return types.SimpleNamespace(**{part: helper(f"{package}.{part}".lstrip(".")) for part in fromlist})
    if name.startswith(HELPERS):
        return helper(name.removeprefix(HELPERS))
    return builtins.__import__(name, names, local, fromlist, level)


def helper(name: str) -> types.ModuleType:
    """A module of `msa_tiles.dsl.cutedsl` as plain Python."""
    if name not in _LOADED:
        file = _file(name)
        assert file is not None, name
        _LOADED[name] = load(file)
    return _LOADED[name]


def _file(name: str) -> Path | None:
    """The file of a module of `msa_tiles.dsl.cutedsl`; None for a package."""
    path = PACKAGE / "dsl" / "cutedsl" / name.replace(".", "/")
    return None if path.is_dir() else path.with_name(f"{path.name}.py")


def load(file: Path) -> types.ModuleType:
    """A kernel file as plain Python, its helpers too."""
    module = types.ModuleType(file.stem)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    return module
