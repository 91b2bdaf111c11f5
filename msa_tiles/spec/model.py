"""What the specs declare, as frozen dataclasses that know their file and line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from msa_tiles.spec.expression import Expression
from msa_tiles.spec.mistakes import Location

DSLS = ("tilelang", "cutedsl")
WIDE_ELEMENTS = ("float32", "int32")  # every stored element widens to one of them exactly, so no precision lists them
POSITION_DIMS = ("total_q", "total_k", "num_sequences", "max_blocks")  # they follow from a call's lengths
ROLES = ("query", "key_value", "index_key")  # what a precision names a format for
_SCALE = ".scale"  # of tensors that only calls have whose format of that role has scales
EACH_TOKEN = "token_head"  # the granularity of scales that differ from one key of a head to the next
STRIDES = ("any", "unit_last", "contiguous")
STORAGE_BITS = {"bfloat16": 16, "float32": 32, "float8_e4m3fn": 8, "float8_e8m0fnu": 8, "uint8": 8, "int8": 8}
Point = Mapping[str, int]  # one value for each compile-time dim


def frozen(mapping: Mapping) -> Mapping:
    return MappingProxyType(dict(mapping))


@dataclass(frozen=True)
class Device:
    """One product of a target's family, with the numbers that rooflines and grid sizes need."""

    name: str
    sm_count: int
    memory_gb_per_s: float
    peak_tflops: Mapping[str, float]  # by element
    where: Location = field(compare=False)


@dataclass(frozen=True)
class MmaKind:
    """One way to multiply on a target, and what its machine code must and must not show."""

    name: str
    thread_group: int  # the threads of a block come in multiples of this
    elements: Mapping[str, tuple[str, ...]]  # element it multiplies natively -> opcodes to find
    forbid: tuple[str, ...]
    where: Location = field(compare=False)


@dataclass(frozen=True)
class Target:
    """A GPU family."""

    name: str
    summary: str
    arch: str
    capability: tuple[int, int]
    devices: Mapping[str, Device]
    default_device: str
    shared_memory_per_block: int
    shared_memory_per_sm: int
    registers_per_thread: int
    registers_per_sm: int
    threads_per_block: int
    tensor_memory_columns: int
    mma: Mapping[str, MmaKind]
    copy: Mapping[str, tuple[str, ...]]  # copy engine -> opcodes to find
    forbid: tuple[str, ...]
    inherits: str  # the target that it is as, but for what its file says; empty where it says all
    on_request: bool  # whether its kernels are generated only where somebody names the target
    where: Location = field(compare=False)

    @property
    def sm_count(self) -> int:
        return self.devices[self.default_device].sm_count


@dataclass(frozen=True)
class Scale:
    """The scales stored beside quantised values."""

    dtype: str
    per: tuple[str, ...]  # granularities: tensor, head, token_head, group
    group: int  # values along the head dim that share one scale; 0 when scales do not run along it
    global_dtype: str | None
    where: Location = field(compare=False)


@dataclass(frozen=True)
class Format:
    """How one tensor is stored."""

    name: str
    summary: str
    group: str  # what people call it: bf16, fp8, nvfp4, fp4
    element: str
    bits: int
    storage: str  # dtype of the tensor that holds the elements
    packed: int  # elements in one value of `storage`
    scale: Scale | None
    operand: str  # the device module that loads it, where a row names no other
    where: Location = field(compare=False)

    @property
    def bits_with_scales(self) -> float:
        """Those of an element, with its share of its group's scale where there are groups. Other scales are few."""
        if self.scale is None or not self.scale.group:
            return self.bits
        return self.bits + STORAGE_BITS[self.scale.dtype] / self.scale.group


@dataclass(frozen=True)
class Precision:
    """A combination of formats for one call, and the element in which they are multiplied."""

    name: str
    query: Format
    key_value: Format | None  # None: not for operators that read keys and values
    index_key: Format | None  # None: not for operators that read index keys
    multiply: str
    output: str  # dtype
    where: Location = field(compare=False)
    multiply_where: Location = field(compare=False)

    @property
    def keys(self) -> Format:
        """The format of keys and values or of index keys; where a precision names both they are the same."""
        keys = self.key_value or self.index_key
        assert keys is not None, self.name
        return keys

    @property
    def group(self) -> str:
        """The name under which people look for it: that of its keys."""
        return self.keys.group

    @property
    def scale(self) -> Scale | None:
        """The scales of its keys."""
        return self.keys.scale

    @property
    def decoded(self) -> bool:
        """Whether keys are stored in another element than is multiplied."""
        return self.keys.element != self.multiply

    @property
    def roles(self) -> Mapping[str, Format]:
        """The formats by role."""
        found = {role: getattr(self, role) for role in ROLES}
        return {role: format for role, format in found.items() if format is not None}


def role_of(dtype: str) -> str | None:
    """The role that a tensor's `precision.<role>` or `precision.<role>.scale` names; None for any other dtype."""
    name = dtype.removeprefix("precision.").removesuffix(_SCALE)
    return name if dtype.startswith("precision.") and name in ROLES else None


@dataclass(frozen=True)
class Tensor:
    """A tensor of the contract. `dtype` is a dtype, or `precision.<field>` until a precision resolves it."""

    name: str
    shape: tuple[Expression, ...]
    dtype: str
    strides: str
    optional: bool
    pad: int | None  # the value that means "nothing here"
    note: str
    where: Location = field(compare=False)

    def belongs_to(self, precision: Precision) -> bool:
        """Whether calls of this precision have the tensor."""
        role = role_of(self.dtype)
        return role is None or not self.dtype.endswith(_SCALE) or precision.roles[role].scale is not None

    def resolve_dtype(self, precision: Precision) -> str:
        if not self.dtype.startswith("precision."):
            return self.dtype
        role = role_of(self.dtype)
        if role is None:
            return precision.output
        stored = precision.roles[role]
        if not self.dtype.endswith(_SCALE):
            return stored.storage
        assert stored.scale is not None, f"{precision.name} has no {self.name}"
        return stored.scale.dtype


@dataclass(frozen=True)
class Parameter:
    """An argument that is no tensor. `type` is bool, int, float, dim or choice."""

    name: str
    type: str
    required: bool
    default: Any
    choices: tuple[str, ...]
    where: Location = field(compare=False)


@dataclass(frozen=True)
class Variants:
    """The dims a kernel is compiled for, and the points at which continuous integration compiles it."""

    exact: tuple[str, ...]  # a call must have one of the dim's values
    capacity: tuple[str, ...]  # a call's value is rounded up to the next of the dim's values
    scaled: tuple[str, ...]  # those of the exact dims that only cells have whose keys may have a scale each
    ci: tuple[Point, ...]  # the M3 shape first, then a set in which every pair of values meets

    @property
    def names(self) -> tuple[str, ...]:
        return self.exact + self.capacity

    def ci_points(self, which: str) -> tuple[Point, ...]:
        """All points of ``ci`` ("pairs"), or the first and the fewest others that hold every value ("values")."""
        if which == "pairs":
            return self.ci
        items = [frozenset(point.items()) for point in self.ci]
        chosen, seen = [0], set(items[0])
        while True:
            best = max(range(len(items)), key=lambda place: len(items[place] - seen))
            if items[best] <= seen:
                return tuple(self.ci[place] for place in chosen)
            chosen.append(best)
            seen |= items[best]

    def only(self, values: Mapping[str, tuple[int, ...]]) -> Variants:
        """Those points of ``ci`` whose dims have one of these values."""
        points = (point for point in self.ci if all(point.get(name) in values[name] for name in values))
        return dataclasses.replace(self, ci=tuple(points))

    def of(self, precision: Precision) -> Variants:
        """What a cell of this precision is compiled for."""
        if not self.scaled or (precision.scale is not None and EACH_TOKEN in precision.scale.per):
            return self
        exact = tuple(name for name in self.exact if name not in self.scaled)
        points = ({name: point[name] for name in (*exact, *self.capacity)} for point in self.ci)
        distinct = {tuple(point.items()): frozen(point) for point in points}
        return Variants(exact, self.capacity, (), tuple(distinct.values()))


@dataclass(frozen=True)
class Workload:
    """One call shape on which kernels are checked or timed."""

    label: str
    sequences: tuple[tuple[int, int], ...]  # (queries, keys) of each request
    dims: Mapping[str, int]  # runtime dims, and compile-time dims where they differ from the M3 point
    parameters: Mapping[str, Any]
    values: str  # normal | integer
    selection: str | None  # uniform | sticky, for operators that read block ids
    points: str  # m3 | ci: the compile-time points it runs at
    where: Location = field(compare=False)


@dataclass(frozen=True)
class Roofline:
    flops: Expression
    bytes: Expression


@dataclass(frozen=True)
class KernelRow:
    """One kernel wanted: one cell. A row of a spec over several targets and precisions becomes several of these."""

    dsl: str
    target: str  # empty as it is read: every one that can run it
    precision: str
    algorithm: str  # empty where the operator has one
    compute: str | None  # None: the kernel multiplies as its precision says
    operands: Mapping[str, str]  # role -> device module, where it is not the one of the role's format
    mma: str
    copy: tuple[str, ...]
    tile: Mapping[str, int]
    threads: Expression | None  # None: the kernel's table says, and how much memory and how many registers
    shared_memory: Expression | None  # bytes of a block
    registers: Expression | None  # of a block, where the kernel sets them itself
    tensor_memory: Expression | None  # columns of a block, where it takes any
    expect: tuple[str, ...]  # opcodes to find besides those of mma and copy
    features: tuple[str, ...]
    ci: str  # pairs | values: which points of the operator's `variants.ci` continuous integration compiles
    only: Mapping[str, tuple[int, ...]]  # compile-time dim -> values that are served, where these are not all
    where: Location = field(compare=False)
    key_lines: Mapping[str, Location] = field(compare=False)
    derived: bool = False  # whether the row names no such target, but its mma or one that the target inherits from

    @property
    def cell(self) -> str:
        """What names it among the kernels of its operator."""
        return ".".join(filter(None, (self.dsl, self.target, self.precision, self.algorithm)))

    def computes_in(self, precision: Precision) -> str:
        """The element that the kernel computes on."""
        return self.compute or precision.multiply


@dataclass(frozen=True)
class Operator:
    """The contract of one operator, then the kernels wanted for it."""

    name: str
    summary: str
    reference: str
    dims: Mapping[str, tuple[int, ...] | Expression | None]  # compile-time values | follows from others | free
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    parameters: Mapping[str, Parameter]
    features: Mapping[str, str]
    rules: tuple[Expression, ...]
    variants: Variants
    verify: tuple[Workload, ...]
    bench: tuple[Workload, ...]
    roofline: Roofline
    tolerance: Mapping[str, Mapping[str, float]]  # precision -> output -> largest absolute error ever accepted
    kernels: tuple[KernelRow, ...]
    where: Location = field(compare=False)

    @property
    def m3(self) -> Point:
        return self.variants.ci[0]

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from self.inputs.values()
        yield from self.outputs.values()

    @property
    def roles(self) -> tuple[str, ...]:
        """What of a precision the tensors follow: some of `ROLES`, and `output`."""
        named = {role_of(t.dtype) or "output" for t in self.tensors if t.dtype.startswith("precision.")}
        return tuple(role for role in (*ROLES, "output") if role in named)

    def place(self, cell: str) -> int:
        """Which of the operator's kernels, in the order of the spec, a cell's id names."""
        return [f"{self.name}.{row.cell}" for row in self.kernels].index(cell)

    def values(self, dim: str) -> tuple[int, ...]:
        """The values a compile-time dim is compiled for."""
        found = self.dims[dim]
        assert isinstance(found, tuple), dim
        return found


@dataclass(frozen=True)
class Specs:
    targets: Mapping[str, Target]
    formats: Mapping[str, Format]
    precisions: Mapping[str, Precision]
    operators: Mapping[str, Operator]
    spoilt: tuple[tuple[str, KernelRow], ...] = ()  # rows with mistakes, by operator, where these are only collected
