"""Every decision about a kernel, made once: a row of a spec becomes a frozen plan, or an error at that row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msa_tiles.spec import (
    Expression,
    ExpressionError,
    KernelRow,
    Location,
    Mistakes,
    Operator,
    Point,
    Precision,
    SpecError,
    Specs,
    Target,
)
from msa_tiles.spec.model import DSLS, frozen
from msa_tiles.spec.work import describe
from msa_tiles.tables import Table, TableError

ASKED_REGISTERS = range(24, 257, 8)  # that setmaxnreg takes
LEAST_COLUMNS = 32  # tensor memory is handed out in powers of two from here on, so a sum is a multiple of this


class Cell(NamedTuple):
    """The name of a cell that has no plan, and where its row is."""

    cell: str
    where: Location


class CellError(SpecError):
    """What a row asks of one of its cells cannot be had; `why` is the sentence without the cell's name."""

    def __init__(self, plan: KernelPlan | Cell, why: str) -> None:
        super().__init__(plan.where, f"{plan.cell}: {why}")
        self.cell = plan.cell
        self.why = why


class IllegalError(CellError):
    """The target of a row cannot run a variant that the row declares."""


@dataclass(frozen=True)
class KernelPlan:
    """What one cell's kernel is: sizes, roles, how it multiplies and copies, and what its machine code must show."""

    cell: str
    op: str
    dsl: str
    target: str
    precision: str
    algorithm: str  # empty where the operator has one
    compute: str
    operands: Mapping[str, str]  # role -> device module that loads its tensors
    mma: str
    tile: Mapping[str, int]
    threads_formula: Expression | None  # None: the kernel's table says
    shared_memory_formula: Expression | None  # likewise
    registers_formula: Expression | None  # None: the table says, or the compiler
    tensor_memory_formula: Expression | None  # None: the table says, or it takes none
    expected_opcodes: tuple[str, ...]
    forbidden_opcodes: tuple[str, ...]
    variants: Mapping[str, tuple[int, ...]]
    capacity: tuple[str, ...]
    ci: tuple[Point, ...]
    features: tuple[str, ...]
    where: Location = field(compare=False)
    derived: bool = field(default=False, compare=False)  # whether the row names no such target
    named: tuple[str, ...] = field(default=(), compare=False)  # the roles whose operand the row names
    table: Callable[..., Table] | None = field(
        default=None, compare=False
    )  # of a variant, where the kernel declares it

    @property
    def file(self) -> str:
        """Path of a file of its own, below the directory of generated files."""
        return f"{self.dsl}/{self.target}/{_joined(self.op, self.precision, self.algorithm)}.py"

    @property
    def skeleton(self) -> str:
        """Path of the skeleton, below the directory of skeletons."""
        return f"{self.dsl}/{self.mma}/{_joined(self.op, self.algorithm)}.py"

    def threads(self, variant: Point) -> int:
        """Threads of a block of this variant."""
        if self.threads_formula is None:
            return _sizes(self._table(variant)).threads
        return self.threads_formula.whole({**self.tile, **variant})

    def shared_memory(self, variant: Point) -> int:
        """Bytes of shared memory that a block of this variant takes."""
        if self.shared_memory_formula is None:
            return _sizes(self._table(variant)).shared_memory
        return self.shared_memory_formula.whole({**self.tile, **variant})

    def registers(self, variant: Point) -> int:
        """Registers that a block of this variant claims at run time; 0 when it leaves them to the compiler."""
        if self.threads_formula is None:
            return _sizes(self._table(variant)).registers
        return self.registers_formula.whole({**self.tile, **variant}) if self.registers_formula else 0

    def tensor_memory(self, variant: Point) -> int:
        """Columns of tensor memory that a block of this variant takes."""
        if self.threads_formula is None:
            return _sizes(self._table(variant)).tensor_memory
        return self.tensor_memory_formula.whole({**self.tile, **variant}) if self.tensor_memory_formula else 0

    def points(self) -> Iterator[dict[str, int]]:
        """Every variant that the cell declares."""
        for values in itertools.product(*self.variants.values()):
            yield dict(zip(self.variants, values, strict=True))

    def _table(self, variant: Point) -> Table:
        if self.table is None:
            raise CellError(self, "neither the row nor the kernel says how many threads it has")
        return self.table(**variant)


class _Sizes(NamedTuple):
    """What a block takes by its table."""

    threads: int
    shared_memory: int
    registers: int
    tensor_memory: int


@functools.lru_cache(maxsize=1 << 14)
def _sizes(table: Table) -> _Sizes:
    """Worked out once for each table, which cells of the same code share."""
    return _Sizes(table.threads, table.shared_memory, table.registers, table.tensor_memory)


def illegal(plan: KernelPlan, target: Target, variant: Point) -> str | None:
    """Why `target` cannot run this variant of the plan, as a sentence, or None."""
    if variant.keys() != plan.variants.keys():
        return f"a variant of {plan.cell} has the dims {', '.join(plan.variants) or 'none'}, not {', '.join(variant)}"
    for name, value in variant.items():
        if value not in plan.variants[name]:
            return f"{name} {value} is none of {', '.join(map(str, plan.variants[name]))}"
    if plan.threads_formula is None and (asked := _mistaken_registers(plan._table(variant))):
        return asked
    group, threads = target.mma[plan.mma].thread_group, plan.threads(variant)
    columns = plan.tensor_memory(variant)
    at = f"at {describe(variant)}" if variant else "in all"
    if threads < group or threads % group:
        return f"{threads} threads {at} are no multiple of {group}, as {plan.mma} on {target.name} wants"
    for what, amount, limit in (
        ("threads", threads, target.threads_per_block),
        ("bytes of shared memory", plan.shared_memory(variant), target.shared_memory_per_block),
        ("registers", plan.registers(variant), target.registers_per_sm),
        ("columns of tensor memory", columns, target.tensor_memory_columns),
    ):
        if amount > limit:
            return f"{amount} {what} {at} exceed the {limit} that a block can have on {target.name}"
    if columns % LEAST_COLUMNS:
        return f"{columns} columns of tensor memory {at} are no multiple of {LEAST_COLUMNS}, as it is handed out"
    return None


@functools.lru_cache(maxsize=1 << 14)
def _mistaken_registers(table: Table) -> str:
    """Which role asks for registers in a number that setmaxnreg does not take; empty where none does."""
    for role in table.roles.values():
        if role.registers and role.registers not in ASKED_REGISTERS:
            least, most = ASKED_REGISTERS[0], ASKED_REGISTERS[-1]
            return (
                f"the {role.name} asks for {role.registers} registers a thread, wanted a multiple of "
                f"{ASKED_REGISTERS.step} from {least} to {most}, as setmaxnreg takes them"
            )
    return ""


def plan_row(row: KernelRow, operator: Operator, target: Target, precision: Precision) -> KernelPlan:
    """The plan of one row. Raises SpecError when a declared variant of it is illegal."""
    kind, compute = target.mma[row.mma], row.computes_in(precision)
    read = {role: stored for role, stored in precision.roles.items() if role in operator.roles}
    copies = itertools.chain.from_iterable(target.copy[engine] for engine in row.copy)
    variants = operator.variants.of(precision).only(row.only)
    plan = KernelPlan(
        cell=f"{operator.name}.{row.cell}",
        op=operator.name,
        dsl=row.dsl,
        target=row.target,
        precision=row.precision,
        algorithm=row.algorithm,
        compute=compute,
        operands=frozen({role: row.operands.get(role, stored.operand) for role, stored in read.items()}),
        mma=row.mma,
        tile=row.tile,
        threads_formula=row.threads,
        shared_memory_formula=row.shared_memory,
        registers_formula=row.registers,
        tensor_memory_formula=row.tensor_memory,
        expected_opcodes=tuple(dict.fromkeys((*kind.elements[compute], *copies, *row.expect))),
        forbidden_opcodes=tuple(dict.fromkeys((*kind.forbid, *target.forbid))),
        variants=frozen({name: row.only.get(name, operator.values(name)) for name in variants.names}),
        capacity=variants.capacity,
        ci=variants.ci_points(row.ci),
        features=row.features,
        where=row.where.of(operator.where),
        derived=row.derived,
        named=tuple(row.operands),
    )
    if row.threads is not None:
        _check(plan, target)
    return plan


def completed(plan: KernelPlan, table: Callable[..., Table] | None, target: Target) -> KernelPlan:
    """The plan with the table of its rendered kernel, which stands in for the row's formulas.

    Raises SpecError where both or none are there, or when a declared variant is illegal.
    """
    if table is None:
        return plan
    if plan.threads_formula is not None:
        raise CellError(plan, "the kernel has a table; threads and memory in the row say it twice")
    plan = replace(plan, table=table)
    _check(plan, target)
    return plan


def _check(plan: KernelPlan, target: Target) -> None:
    for variant in plan.points():
        try:
            refusal = illegal(plan, target, variant)
        except (ExpressionError, TableError) as error:
            raise CellError(plan, str(error)) from error
        if refusal:
            raise IllegalError(plan, refusal)


class CellMistakes(Mistakes):
    """Mistakes of cells; one that several cells of a row have is told once, with all their names."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        found: dict[tuple[Location, str], list[str]] = {}
        others = []
        for mistake in itertools.chain.from_iterable(each.mistakes for each in self.found):
            if isinstance(mistake, CellError):
                found.setdefault((mistake.where, mistake.why), []).append(mistake.cell)
            else:
                others.append(mistake)
        told = [SpecError(where, f"{', '.join(dict.fromkeys(cells))}: {why}") for (where, why), cells in found.items()]
        self.found = [*told, *others]
        super().__exit__(kind, error, trace)


@dataclass(frozen=True)
class Selection:
    """Which cells a command is about; an empty field means all."""

    ops: Collection[str] = ()
    dsls: Collection[str] = ()
    targets: Collection[str] = ()
    precisions: Collection[str] = ()

    @property
    def everything(self) -> bool:
        return not (self.ops or self.dsls or self.targets or self.precisions)

    def holds(self, cell: str) -> bool:
        parts = cell.split(".")
        wanted = (self.ops, self.dsls, self.targets, self.precisions)
        # What may follow is the algorithm.
        return all(not names or part in names for part, names in zip(parts, wanted, strict=False))


def plans(
    specs: Specs,
    requested: Collection[str] = (),
    unfit: dict[str, str] | None = None,
    mistakes: Mistakes | None = None,
) -> list[KernelPlan]:
    """The plan of every cell, ordered by operator, DSL, target, precision and algorithm.

    Those of targets that are generated on request are left out where the target is not `requested`. So are cells whose
    target no row names and that it cannot run; `unfit` hears why, by cell. `mistakes` hears of rows that have no plan,
    whose cells are left out, too; without it SpecError is raised, with all of them.
    """
    if mistakes is None:
        with CellMistakes() as told:
            return plans(specs, requested, unfit, told)
    found = []
    for operator in specs.operators.values():
        for row in operator.kernels:
            target = specs.targets[row.target]
            if target.on_request and target.name not in requested:
                continue
            try:
                found.append(plan_row(row, operator, target, specs.precisions[row.precision]))
            except IllegalError as error:
                if row.derived and unfit is not None:
                    unfit[f"{operator.name}.{row.cell}"] = error.sentence
                else:
                    mistakes.add(error)
            except SpecError as error:
                mistakes.add(error)
    return sorted(found, key=lambda plan: (plan.op, DSLS.index(plan.dsl), plan.target, plan.precision, plan.algorithm))


def _joined(*names: str) -> str:
    return "_".join(filter(None, names))
