"""The one place where a kernel is chosen.

Every cell of the operator looks at the call and answers with a refusal, a sentence, or with the variant that it would
run. Of those that accept, one that is verified goes before one that is not; then the one runs that was measured to be
the fastest at the call's size, as committed by `msa-tiles tune`; where none of the precision was, one of the DSL that
was the faster one in another precision; without figures, one of the DSL that stands first in `DSLS`. A kernel that lies
in a pack goes before one that would have to be compiled. `backend` names a DSL instead.

Some calls launch kernels of other operators on their way: sparse_attention builds a schedule and merges partial
results. `backend` holds for these helpers too, where that DSL has a kernel that serves them; elsewhere any DSL's will
do, for all agree on the tensors in between.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from msa_tiles import trees
from msa_tiles.runtime import evidence, packs, toolchain, tuned
from msa_tiles.runtime.blocks import excess
from msa_tiles.runtime.cache import Entry
from msa_tiles.runtime.facts import CallFacts, DeviceFacts, device_facts
from msa_tiles.runtime.launch import Kernel
from msa_tiles.runtime.packs import Pack, Packed
from msa_tiles.runtime.pending import Pending, obtain
from msa_tiles.runtime.registry import Cell, Registry, Target, default_registry
from msa_tiles.scoped import held
from msa_tiles.spec.model import DSLS

_log = logging.getLogger(__name__)
BACKENDS = ("auto", *DSLS, "reference")


class NoKernelError(ValueError):
    """No kernel serves a call. The text lists every candidate and why it refused."""


@dataclass(frozen=True)
class Candidate:
    """One cell's answer to a call: the variant it would run, or why it refuses."""

    cell: Cell
    variant: Mapping[str, int]
    refusal: str | None
    packed: Packed | None = None  # where a pack has it


class Rank(NamedTuple):
    """What decides between candidates that accept, in this order; the least one runs, of equal ones the first."""

    unasked: bool  # it is not the cell that whoever measures rivals asks for
    foreign: bool  # it is of another target of the same architecture
    unverified: bool
    unpacked: bool
    ms: float
    dsl: int


@dataclass(frozen=True)
class Decision:
    """Every candidate, the one that runs (None when all refuse), and the measurement that was looked at, if any.

    `ranks` are those of the candidates that accept, by cell id.
    """

    call: CallFacts
    device: DeviceFacts
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    figure: tuned.Figure | None = None
    ranks: Mapping[str, Rank] = dataclasses.field(default_factory=dict)

    def why_not(self, candidate: Candidate) -> str | None:
        """Why a candidate that accepts does not run; None for the one that does, and for those that refuse."""
        if self.chosen is None or candidate.refusal is not None or candidate.cell is self.chosen.cell:
            return None
        name, own, first = self.chosen.cell.id, self.ranks[candidate.cell.id], self.ranks[self.chosen.cell.id]
        if own[:4] != first[:4]:
            whys = (
                "is asked for",
                f"is of the target {self.chosen.cell.target}",
                "is verified, and this one is not",
                "is in a pack, and this one is not",
            )
            return f"{name} {next(why for why, one, other in zip(whys, own, first, strict=False) if one != other)}"
        if own.ms == first.ms or self.figure is None:
            same = candidate.cell.dsl == self.chosen.cell.dsl
            before = f"{name} comes first" if same else f"kernels of {self.chosen.cell.dsl} go first"
            return f"no figures tell them apart, and {before}"
        if math.isinf(own.ms):
            return f"it has no figure, and {name} has one"
        told = f"{first.ms:.4g} ms against {own.ms:.4g} ms, {self.figure.workload} on {self.figure.card}"
        if candidate.cell.id not in self.figure.ms:
            return f"{self.chosen.cell.dsl} is faster on record in {self.figure.precision} ({told})"
        return f"{name} is faster on record ({told})"

    def complaint(self) -> str:
        """The text of NoKernelError for this decision."""
        dims = "".join(f", {name}={value}" for name, value in self.call.variant.items())
        needs = f", needs {', '.join(sorted(self.call.features))}" if self.call.features else ""
        head = f"{self.call.op}: no kernel serves this call ({self.device}, {self.call.precision}{dims}{needs})"
        if not self.candidates:
            return f"{head}; none is generated for this operator"
        return f"{head}:" + "".join(f"\n  {c.cell.id}: {c.refusal}" for c in self.candidates)


def decide(call: CallFacts, device: DeviceFacts, registry: Registry, backend: str = "auto") -> Decision:
    """Ask every cell of the operator."""
    candidates = tuple(_ask(cell, call, device, registry, backend) for cell in registry.of(call.op))
    accepting = [candidate for candidate in candidates if candidate.refusal is None]
    cells = [candidate.cell for candidate in accepting]
    figure = tuned.nearest(tuned.counting(tuned.figures_of(*registry.directories), cells), call.size)
    ms = {} if figure is None else tuned.times(figure, cells)
    preferred = _preferred.get()
    ranks = {
        c.cell.id: Rank(
            c.cell.id != preferred,
            c.cell.target != device.target,
            len(accepting) > 1 and not evidence.has_run(c.cell, registry),
            c.packed is None,
            *tuned.preference(c.cell, ms),
        )
        for c in accepting
    }
    chosen = min(accepting, key=lambda c: ranks[c.cell.id], default=None)
    return Decision(call, device, candidates, chosen, figure, ranks)


def fit_variant(cell: Cell, wanted: Mapping[str, int]) -> tuple[dict[str, int], str | None]:
    """The supported variant that serves the wanted dims, and why there is none: every dim that does not fit."""
    variant: dict[str, int] = {}
    misfits = []
    for name, supported in cell.variants.items():
        if name not in wanted:
            misfits.append(f"the call does not say {name}")
            continue
        value = wanted[name]
        if name in cell.capacity:
            enough = [capacity for capacity in supported if capacity >= value]
            if enough:
                variant[name] = min(enough)
            else:
                misfits.append(f"{name} is {value}, wanted at most {max(supported)}")
        elif value in supported:
            variant[name] = value
        else:
            misfits.append(f"{name} is {value}, wanted {_one_of(supported)}")
    return variant, "; ".join(misfits) or None


def _ask(cell: Cell, call: CallFacts, device: DeviceFacts, registry: Registry, backend: str) -> Candidate:
    variant, misfit = fit_variant(cell, call.variant)
    missing = sorted(call.features - cell.features)
    alike = _stored_alike(cell, call, registry)
    if not alike:  # what only its precision has is no further reason
        _, misfit = fit_variant(cell, {**{name: cell.variants[name][0] for name in cell.variants}, **call.variant})
    why = cell.entry["refuses"]
    refusals = [f"it is a {cell.dsl} kernel, backend={backend!r} was asked for"] * (backend not in ("auto", cell.dsl))
    target = registry.targets.get(device.target or "")
    if not _runs_on(cell, device, target):
        refusals.append(f"it is for {cell.target}, the call is on {device}")
    elif target is not None and variant.keys() == cell.variants.keys() and _made_for_another(cell, target, registry):
        refusals += filter(None, [excess(cell, variant, target)])
    if not alike:
        refusals.append(f"it takes {cell.precision}, the call is {call.precision}")
    refusals += [misfit] if misfit else []
    refusals += [f"it does not serve {name}" + (f" ({why[name]})" if name in why else "") for name in missing]
    refusals += call.refusals
    if refusals:
        return Candidate(cell, variant, "; ".join(refusals))
    packed = packs.find(cell, variant)
    return Candidate(cell, variant, None if packed else _not_compilable(cell, variant), packed)


def _runs_on(cell: Cell, device: DeviceFacts, target: Target | None) -> bool:
    """Whether a cell is for the device's target, or for another of the same architecture: a tree may have one."""
    return device.target == cell.target or (target is not None and target.arch == cell.arch)


def _made_for_another(cell: Cell, target: Target, registry: Registry) -> bool:
    """Whether a target's limits are not those that the cell was generated for: another's, or changed by a tree."""
    return target.name != cell.target or target.name in registry.changed


def _not_compilable(cell: Cell, variant: Mapping[str, int]) -> str | None:
    """Why a kernel that no pack has cannot run here, or None."""
    reason = None if _elsewhere.get() else toolchain.missing(cell.dsl)
    return None if reason is None else "; ".join([reason, *packs.mismatches(cell, variant)])


def _stored_alike(cell: Cell, call: CallFacts, registry: Registry) -> bool:
    """Whether the tensors that the cell's operator reads and writes are stored in the call as the cell takes them."""
    precision = registry.precisions.get(call.precision)
    return precision is not None and precision.agrees(registry.precisions[cell.precision], cell.reads)


def _one_of(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, sorted(values)))}"


_preferred: contextvars.ContextVar[str | None] = contextvars.ContextVar("preferred cell", default=None)


def preferring(cell: Cell) -> AbstractContextManager[None]:
    """This cell serves every call that it accepts, whatever was measured: for whoever measures rivals of one DSL.

    Operators remember calls besides: see `msa_tiles.library.remember.forget_all`.
    """
    return held(_preferred, cell.id)


_elsewhere: contextvars.ContextVar[bool] = contextvars.ContextVar("DSLs are taken to be installed", default=False)


def as_if_installed() -> AbstractContextManager[None]:
    """Decisions within the block are those of a machine that has both DSLs: for whoever asks, and runs nothing."""
    return held(_elsewhere, True)


_watching: list[list[Kernel]] = []


@contextmanager
def finding() -> Iterator[list[Kernel]]:
    """The kernels that calls look for within the block, in whichever thread: autograd has threads of its own.

    A call that an operator remembers looks for none: see `msa_tiles.library.remember.forget_all`.
    """
    found: list[Kernel] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching[:] = [other for other in _watching if other is not found]


Met = Callable[["Decision", bool], Any]
_met: contextvars.ContextVar[Met | None] = contextvars.ContextVar("who meets decisions", default=None)


def meeting(met: Met) -> AbstractContextManager[None]:
    """Nothing is found, compiled or kept: `met(decision, True)` answers whoever looks for a kernel with a stand-in.

    `met(decision, False)` answers those that only ask whether there is one: None where none is.
    """
    return held(_met, met)


_kernels: dict[tuple, Kernel] = {}


def find_kernel(op: str, facts: CallFacts, backend: str = "auto", *, helper: bool = False) -> Kernel:
    """The kernel that serves a call, compiled on first use and kept for the life of the process.

    A kernel that has to be compiled is so in a process of its own from now on, and its first launch waits for it.
    A `helper` is a kernel that another operator's call launches on its way: `backend` is a preference there.

    Raises NoKernelError when no cell serves the call, ToolchainError when there is nothing to compile the chosen one
    with. Its first launch raises CompileError when it does not compile.
    """
    if (met := _met.get()) is not None:
        return met(_decide(op, facts, backend, helper)[0], True)
    key = _key(op, facts, backend, helper)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _find(op, facts, backend, helper)
    for found in _watching:
        found.append(kernel)
    return kernel


_served: dict[tuple, bool] = {}


def serves(op: str, facts: CallFacts, backend: str = "auto", *, helper: bool = False, verified: bool = False) -> bool:
    """Whether `find_kernel` would find a kernel, with `verified` one that ran on its GPU and agreed with the reference.

    Compiles nothing; the answer is kept for the life of the process.
    """
    if (met := _met.get()) is not None:
        decision, registry = _decide(op, facts, backend, helper)
        return (not verified or _has_run(decision, registry)) and met(decision, False) is not None
    key = (*_key(op, facts, backend, helper), verified)
    answer = _served.get(key)
    if answer is None:
        decision, registry = _decide(op, facts, backend, helper)
        answer = decision.chosen is not None and (not verified or _has_run(decision, registry))
        _served[key] = answer
    return answer


def _has_run(decision: Decision, registry: Registry) -> bool:
    return decision.chosen is not None and evidence.has_run(decision.chosen.cell, registry)


def _key(op: str, facts: CallFacts, backend: str, helper: bool) -> tuple:
    dims = tuple(facts.variant.items())
    asked = (op, facts.device, facts.precision, dims, facts.features, facts.refusals, facts.size)
    return (*asked, backend, helper, _preferred.get(), trees.epoch())


def _find(op: str, facts: CallFacts, backend: str, helper: bool) -> Kernel:
    decision, registry = _decide(op, facts, backend, helper)
    if decision.chosen is None:
        raise NoKernelError("\n".join([decision.complaint(), *map(trees.told_outdated, registry.outdated)]))
    if decision.chosen.cell.tree in registry.outdated:
        _log.warning("%s: %s", decision.chosen.cell.id, trees.told_outdated(decision.chosen.cell.tree))
    cell, variant = decision.chosen.cell, decision.chosen.variant
    entry: Entry | Packed | Pending | None = decision.chosen.packed
    if entry is None:
        for sentence in packs.mismatches(cell, variant):
            _log.warning("%s", sentence)
        entry = obtain(cell, variant, registry.targets[cell.target].arch)
    return Kernel(cell, variant, entry, facts.device)


def use_pack(path: str | os.PathLike[str]) -> Pack:
    """Look for kernels in the pack of a directory first, also for those that were found before.

    Operators remember calls besides, which `msa_tiles.use_pack` has them forget.

    Raises PackError when the pack is damaged, or made for another machine or another TVM-FFI.
    """
    pack = packs.use(path)
    _kernels.clear()
    _served.clear()
    return pack


def _decide(op: str, facts: CallFacts, backend: str, helper: bool) -> tuple[Decision, Registry]:
    if facts.op != op:
        raise ValueError(f"facts are of {facts.op!r}, wanted {op!r}")
    if backend not in BACKENDS or backend == "reference":
        kernels = ", ".join(repr(name) for name in BACKENDS if name != "reference")
        raise ValueError(f"backend is {backend!r}, wanted one of {kernels} for a kernel")
    registry = default_registry()
    device = device_facts(facts.device, registry.targets.values())
    decision = decide(facts, device, registry, backend)
    if decision.chosen is None and helper:
        decision = decide(facts, device, registry)
    return decision, registry
