"""What a thread block is made of, said once: roles (warps), pipelines (barriers), buffers (shared and tensor memory).

A kernel declares it in its function `cta`, an operand adds its share in its function `parts`. Barrier set-up, byte
counts, the kernel's docstring and what the audit expects are derived from it. This module is plain Python, and what is
decorated with `declares` uses nothing but it, and constants and marked functions of its file and of what that imports:
so generation, audit and tests read the same table as the kernel, without the DSL.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

WARP = 32
BARRIER_BYTES = 8
ARRAY_ALIGN = 16  # of a static array, in bytes
TILELANG = 1024  # what the static arrays of a TileLang kernel take a multiple of, in bytes
WIDTH = 116  # of a line of a docstring
LANE, EACH_WARP, EACH_THREAD, COMMIT = "1 lane", "1 lane of each warp", "every thread", "a commit"
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint32": 4, "int64": 8, "float8_e4m3fn": 1, "uint8": 1}


class TableError(ValueError):
    """A table that contradicts itself; the sentence names what does."""


class Role(NamedTuple):
    """Warps that do the same. Roles take the block's warps in their order."""

    name: str
    warps: int
    does: str
    registers: int = 0  # that each thread asks for with setmaxnreg; 0: what the kernel starts with


class Arrival(NamedTuple):
    """Who arrives at a barrier in each of its phases."""

    role: str
    who: str


def lane(role: str) -> Arrival:
    """One lane of a role."""
    return Arrival(role, LANE)


def warps(role: str) -> Arrival:
    """One lane of each warp of a role."""
    return Arrival(role, EACH_WARP)


def commits(role: str) -> Arrival:
    """The tensor cores, once the products that a role has started are done."""
    return Arrival(role, COMMIT)


def threads(role: str) -> Arrival:
    """Every thread of a role, or a copy that each of them started."""
    return Arrival(role, EACH_THREAD)


class Pipeline(NamedTuple):
    """`depth` stages that are filled and freed in turn: barriers `<name>_full`, and `<name>_free` if anybody frees."""

    name: str
    depth: int
    full: tuple[Arrival, ...]
    free: tuple[Arrival, ...] = ()
    fills: tuple[str, ...] = ()  # buffers, of which TMA writes one stage each
    bytes: int | None = None  # that TMA writes a stage; None: the whole of that
    note: str = ""


class Buffer(NamedTuple):
    """A tensor in shared memory; with a dim `stages` it belongs to a pipeline of that depth."""

    name: str
    element: str
    dims: dict[str, int]
    align: int
    note: str
    static: bool = False

    @property
    def bytes(self) -> int:
        size = BYTES[self.element]
        for extent in self.dims.values():
            size *= extent
        return size

    @property
    def stage_bytes(self) -> int:
        return self.bytes // self.dims.get("stages", 1)


def buffer(name: str, element: str, *, align: int = 16, note: str = "", static: bool = False, **dims: int) -> Buffer:
    """A buffer of these dims, in the order in which they are written in the docstring.

    A static one has an array of its own, of a size that the compiler knows; the others share what a launch asks for.
    """
    return Buffer(name, element, dims, align, note, static)


class Columns(NamedTuple):
    """`count` tiles in tensor memory, each of so many columns of its 128 lanes."""

    name: str
    count: int
    columns: int
    note: str = ""


class Parts(NamedTuple):
    """What an operand adds to a table."""

    pipelines: tuple[Pipeline, ...]
    buffers: tuple[Buffer, ...]


def declares(function: Any) -> Any:
    """Marks a function that makes a table or parts of one from plain numbers."""
    return function


class Table:
    """Roles, pipelines and buffers of a thread block. Raises TableError where they do not fit together."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        pipelines: tuple[Pipeline, ...],
        buffers: tuple[Buffer, ...] = (),
        tensor_memory: tuple[Columns, ...] = (),
        static: int = 0,
    ) -> None:
        """With `static` the barriers and static buffers come first, in a multiple of so many bytes, as TileLang has it;
        without it the barriers come last.
        """
        self.static = static
        self.roles = {role.name: role for role in roles}
        self.pipelines = {pipeline.name: pipeline for pipeline in pipelines}
        self.buffers = {each.name: each for each in buffers}
        self.columns = {each.name: each for each in tensor_memory}
        for what, given, kept in (
            ("roles", roles, self.roles),
            ("pipelines", pipelines, self.pipelines),
            ("buffers", buffers, self.buffers),
            ("tiles of tensor memory", tensor_memory, self.columns),
        ):
            if len(given) != len(kept):
                raise TableError(f"two of the table's {what} have one name: {', '.join(each.name for each in given)}")
        for pipeline in pipelines:
            self._check(pipeline)
        # Barriers in the order of the table, as (name, arrivals), one for each stage.
        self.barriers = [
            barrier
            for pipeline in pipelines
            for kind, arrivals in (("full", pipeline.full), ("free", pipeline.free))
            if arrivals
            for barrier in [(f"{pipeline.name}_{kind}", sum(map(self._count, arrivals)))] * pipeline.depth
        ]

    def _check(self, pipeline: Pipeline) -> None:
        if not pipeline.full:
            raise TableError(f"nobody arrives at the pipeline {pipeline.name}")
        for arrival in (*pipeline.full, *pipeline.free):
            if arrival.role not in self.roles:
                raise TableError(f"{pipeline.name} waits for {arrival.role}, which is no role of the table")
        for name in pipeline.fills:
            if name not in self.buffers:
                raise TableError(f"{pipeline.name} fills {name}, which is no buffer of the table")
            if self.buffers[name].dims.get("stages", 1) != pipeline.depth:
                raise TableError(f"{pipeline.name} has {pipeline.depth} stages, its buffer {name} another number")
        room = sum(self.buffers[name].stage_bytes for name in pipeline.fills)
        if pipeline.bytes is not None and not 0 < pipeline.bytes <= room:
            raise TableError(f"{pipeline.name} brings {pipeline.bytes} bytes a stage, its buffers hold {room}")

    def _count(self, arrival: Arrival) -> int:
        warps_of_role = self.roles[arrival.role].warps
        return {LANE: 1, COMMIT: 1, EACH_WARP: warps_of_role, EACH_THREAD: WARP * warps_of_role}[arrival.who]

    @property
    def threads(self) -> int:
        return WARP * sum(role.warps for role in self.roles.values())

    @property
    def registers(self) -> int:
        """Registers that the block asks for with setmaxnreg, 0 when it does not."""
        return sum(WARP * role.warps * role.registers for role in self.roles.values())

    def first_warp(self, role: str) -> int:
        """Where a role's warps begin."""
        names = list(self.roles)
        return sum(self.roles[name].warps for name in names[: names.index(role)])

    def threads_of(self, role: str) -> int:
        return WARP * self.roles[role].warps

    def depth(self, pipeline: str) -> int:
        return self.pipelines[pipeline].depth

    def bytes_of(self, pipeline: str) -> int:
        """Bytes that TMA brings for each stage of a pipeline."""
        found = self.pipelines[pipeline]
        return found.bytes or sum(self.buffers[name].stage_bytes for name in found.fills)

    def place(self, barrier: str) -> int:
        """Where the barriers of this name (`<pipeline>_full`, `<pipeline>_free`) begin among all of them."""
        names = [name for name, _ in self.barriers]
        if barrier not in names:
            raise TableError(f"the table has no barrier {barrier}")
        return names.index(barrier)

    def arrivals(self, barrier: str) -> list[int]:
        """How many arrive at each of the barriers of this name."""
        found = [count for name, count in self.barriers if name == barrier]
        if not found:
            raise TableError(f"the table has no barrier {barrier}")
        return found

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory: the buffers in their order, then the barriers; or as TileLang lays them out."""
        if not self.static:
            end = _laid_out(self.buffers.values())
            return _up(end, BARRIER_BYTES) + BARRIER_BYTES * len(self.barriers)
        names = [name for name, _ in self.barriers]
        arrays = sum(_up(BARRIER_BYTES * names.count(name), ARRAY_ALIGN) for name in dict.fromkeys(names))
        own = sum(_up(each.bytes, ARRAY_ALIGN) for each in self.buffers.values() if each.static)
        # The largest first, whatever the order of the table.
        shared = sorted((each for each in self.buffers.values() if not each.static), key=lambda each: -each.bytes)
        return _up(arrays + own, self.static) + _laid_out(shared)

    @property
    def tensor_memory(self) -> int:
        """Columns of tensor memory."""
        return sum(each.count * each.columns for each in self.columns.values())

    def column(self, name: str) -> int:
        """Where tiles of this name begin in tensor memory."""
        names = list(self.columns)
        if name not in names:
            raise TableError(f"the table has no tiles {name} in tensor memory")
        return sum(each.count * each.columns for each in list(self.columns.values())[: names.index(name)])


def _laid_out(buffers: Iterable[Buffer]) -> int:
    end = 0
    for each in buffers:
        end = _up(end, each.align) + each.bytes
    return end


def _up(size: int, align: int) -> int:
    return -(-size // align) * align


def describe(tables: list[Table]) -> list[str]:
    """The lines of a docstring that tell what the tables of all variants have; what some lack comes with a word."""
    lines = ["Warps"]
    for role in tables[0].roles.values():
        spans = " or ".join(dict.fromkeys(_span(table, role.name) for table in tables))
        registers = f" ({role.registers} registers)" if role.registers else ""
        lines.append(f"  {spans:7} {role.name}{registers}: {role.does}")
    if names := _all(tables, "pipelines"):
        lines += ["", "Pipelines"]
    for name in names:
        each = next(table.pipelines[name] for table in tables if name in table.pipelines)
        bytes_of = [f"bytes of {', '.join(each.fills)}"] if each.fills else []
        full = " + ".join([*_arrivals(tables, name), *bytes_of])
        free = " + ".join(map(_told, each.free)) or "nobody"
        note = f"; {each.note}" if each.note else ""
        some = _some(tables, "pipelines", name)
        lines.append(f"  {name}: {each.depth} deep, full by {full}, freed by {free}{some}{note}")
    names = _all(tables, "buffers")
    barriers = any(table.barriers for table in tables)
    if names or barriers:
        lines += ["", "Shared memory"]
    for name in names:
        each = next(table.buffers[name] for table in tables if name in table.buffers)
        note = f", {each.note}" if each.note else ""
        dims = ", ".join(each.dims)
        lines.append(f"  {name} [{dims}] {each.element}{note}{_some(tables, 'buffers', name)}")
    if barriers:
        lines.append("  barriers")
    if names := _all(tables, "columns"):
        lines += ["", "Tensor memory"]
    for name in names:
        each = next(table.columns[name] for table in tables if name in table.columns)
        note = f", {each.note}" if each.note else ""
        lines.append(f"  {name} [{each.count}, columns]{note}{_some(tables, 'columns', name)}")
    return [part for line in lines for part in _wrapped(line)]


def _span(table: Table, role: str) -> str:
    """A role's warps, the first and the last."""
    begin, count = table.first_warp(role), table.roles[role].warps
    return f"{begin} .. {begin + count - 1}" if count > 1 else str(begin)


def _wrapped(line: str) -> list[str]:
    """A line, cut between words where it is too long."""
    parts = [line]
    while len(parts[-1]) > WIDTH:
        cut = parts[-1].rindex(" ", 0, WIDTH + 1)
        parts[-1:] = [parts[-1][:cut], " " * 6 + parts[-1][cut + 1 :]]
    return parts


def _arrivals(tables: list[Table], name: str) -> list[str]:
    """Who fills the stages of a pipeline, in any table that has it."""
    alike = [table.pipelines[name].full for table in tables if name in table.pipelines]
    arrivals = dict.fromkeys(arrival for full in alike for arrival in full)
    return [
        _told(arrival) + ("" if all(arrival in full for full in alike) else " (some variants)") for arrival in arrivals
    ]


def _told(arrival: Arrival) -> str:
    return f"{arrival.who} of {arrival.role}"


def _all(tables: list[Table], kind: str) -> list[str]:
    """The names that any table has; where one comes that others lack, it stands behind those it follows there."""
    longest = max(tables, key=lambda table: len(getattr(table, kind)))
    return list(dict.fromkeys(name for table in (longest, *tables) for name in getattr(table, kind)))


def _some(tables: list[Table], kind: str, name: str) -> str:
    return "" if all(name in getattr(table, kind) for table in tables) else " (some variants)"
