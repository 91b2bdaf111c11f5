"""What the specs declare, as frozen dataclasses that know their file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from msa_tiles.spec.expression import Expression
from msa_tiles.spec.source import Location

DSLS = ("tilelang", "cutedsl")
WIDE_ELEMENTS = ("float32", "int32")  # every stored element widens to one of them exactly, so no precision lists them
POSITION_DIMS = ("total_q", "total_k", "num_sequences", "max_blocks")  # they follow from a call's lengths
SCALE_DTYPE = "precision.scale"  # of tensors that only calls of precisions with scales have
STRIDES = ("any", "unit_last", "contiguous")
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
class Precision:
    """How tensors are stored, and in which elements they may be multiplied."""

    name: str
    summary: str
    element: str
    bits: int
    storage: str  # dtype of the tensor that holds the elements
    packed: int  # elements in one value of `storage`
    scale: Scale | None
    compute: tuple[str, ...]
    query: tuple[str, ...]  # dtypes a query may have above this storage
    output: str
    where: Location = field(compare=False)
    compute_where: Location = field(compare=False)

    def query_above(self, compute: str) -> str:
        """The dtype of queries that are multiplied in `compute` with this storage."""
        return compute if compute in self.query else self.query[0]


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
        return self.dtype != SCALE_DTYPE or precision.scale is not None

    def resolve_dtype(self, precision: Precision, compute: str) -> str:
        if not self.dtype.startswith("precision."):
            return self.dtype
        if self.dtype == SCALE_DTYPE:
            assert precision.scale is not None, f"{precision.name} has no {self.name}"
            return precision.scale.dtype
        if self.dtype == "precision.query":
            return precision.query_above(compute)
        return str(getattr(precision, self.dtype.removeprefix("precision.")))


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
    scaled: tuple[str, ...]  # those of the exact dims that only cells of precisions with scales have
    ci: tuple[Point, ...]  # the M3 shape first, then a set in which every pair of values meets

    @property
    def names(self) -> tuple[str, ...]:
        return self.exact + self.capacity

    def ci_points(self, which: str) -> tuple[Point, ...]:
        """All points of ``ci`` ("pairs"), or the first and the fewest others that hold every value ("values")."""
        if which == "pairs":
            return self.ci
        chosen = [self.ci[0]]
        while True:
            seen = {item for point in chosen for item in point.items()}
            best = max(self.ci, key=lambda point: len(point.items() - seen))
            if best.items() <= seen:
                return tuple(chosen)
            chosen.append(best)

    def of(self, precision: Precision) -> Variants:
        """What a cell of this precision is compiled for."""
        if precision.scale is not None or not self.scaled:
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
    """One kernel wanted: one cell, one generated file."""

    dsl: str
    target: str
    precision: str
    compute: str
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
    where: Location = field(compare=False)
    key_lines: Mapping[str, Location] = field(compare=False)


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

    def values(self, dim: str) -> tuple[int, ...]:
        """The values a compile-time dim is compiled for."""
        found = self.dims[dim]
        assert isinstance(found, tuple), dim
        return found


@dataclass(frozen=True)
class Specs:
    targets: Mapping[str, Target]
    precisions: Mapping[str, Precision]
    operators: Mapping[str, Operator]
