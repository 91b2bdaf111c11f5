"""A rehearsal: an operator runs on tensors without values, and meets stand-ins for kernels that note what they see.

What validates a call, chooses kernels, cuts work into windows and allocates is the very code that runs the call, so
that the answer cannot drift from it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from msa_tiles import ops, trees
from msa_tiles.call import backends
from msa_tiles.explaining import expect, grids
from msa_tiles.explaining.report import (
    BORROWED,
    NOTHING,
    REFERENCE,
    Asked,
    Expectation,
    Explanation,
    Launched,
    rounded_copy,
    widening,
)
from msa_tiles.explaining.sequences import sequences_of
from msa_tiles.library import registration
from msa_tiles.quant import GROUPS, QuantizedTensor
from msa_tiles.runtime import packs
from msa_tiles.runtime.accuracy import accuracies_of
from msa_tiles.runtime.compiler import find_compiled
from msa_tiles.runtime.dispatch import Candidate, Decision, meeting
from msa_tiles.runtime.facts import DeviceFacts, facts_of, standing_for, target_facts
from msa_tiles.runtime.parts import COPIER, WHOLES
from msa_tiles.runtime.registry import Registry, default_registry

# Those that were timed as a whole, with the roofline of just these.
TIMED = ("msa_decode",)
# Takes a part of the work of the operator that launches it, whose roofline is of both.
PARTIAL = ("shared_attention",)


def explain(
    operator: Callable[..., Any], /, *arguments: Any, device: str | torch.device | None = None, **named: Any
) -> Explanation:
    """What ``operator(*arguments, **named)`` would do on a device: computes nothing, compiles nothing.

    ``operator`` is one of `msa_tiles.ops`. Tensors may lie anywhere, also on the meta device: their shapes, dtypes,
    strides and addresses count, and the lengths of requests where they have values. They are taken to lie on
    ``device``: a target such as ``"sm90"``, a card such as ``"H100"``, ``"cuda"``, ``"cpu"``; by default on their own
    CUDA device, else, and the answer says so, on one of the target that has most kernels. The backward pass is a call
    of its own.

    Raises what the call would raise for wrong arguments, TypeError for something that is no operator, ValueError for a
    device that no spec knows, and PackError for a damaged pack. That no kernel serves the call is no error: see
    `Explanation.served`.
    """
    op = getattr(operator, "__name__", "")
    if op not in ops.__all__ or getattr(ops, op) is not operator or not inspect.isfunction(operator):
        raise TypeError(f"operator is {operator!r}, wanted a function of msa_tiles.ops, such as ops.sparse_attention")
    registry = default_registry()
    given = [part for part in _tensors((arguments, named)) if isinstance(part, Tensor)]
    place, facts = _where(device, given, registry)
    fakes = _Fakes(given)
    met = _Met(registry)
    notes: list[str] = []
    if device is None and given and given[0].device.type != "cuda":
        place_of, cpu = given[0].device.type, " What runs on the CPU is the reference: device='cpu'."
        notes.append(
            f"No device is named and the tensors are on {place_of}: as if on {facts}.{cpu * (place_of == 'cpu')}"
        )
    moved, named_moved = fakes.of(arguments), fakes.of(named)
    on_kernels = backends.rehearsing(met.rehearsal) if place.type == "cuda" else contextlib.nullcontext()
    with standing_for(facts), meeting(met), registration.rehearsing(), on_kernels, fakes:
        try:
            results = operator(*moved, **named_moved)
        except Exception:
            if not any(entry.stopped for entry in met.entries):
                raise
            notes.append("What comes after the kernel that is missing is not known.")
            results = None
        result_bytes = fakes.held(results)
        workspace = fakes.peak - result_bytes
    del results
    return _report(op, operator, arguments, named, met, facts, registry, (workspace, result_bytes), notes)


def _where(
    device: str | torch.device | None, given: list[Tensor], registry: Registry
) -> tuple[torch.device, DeviceFacts]:
    """The device that the tensors are taken to lie on, and its facts."""
    if device is None:
        own = given[0].device if given else torch.device("cpu")
        usual = collections.Counter(cell.target for cell in registry.cells).most_common(1)[0][0]
        if own.type != "cuda":
            return torch.device("cuda", 0), target_facts(registry.targets[usual])
        device = own
    return facts_of(device)


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors of a call's arguments, those of quantised ones and schedules included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, QuantizedTensor | ops.Schedule):
        yield from _tensors([getattr(value, part.name) for part in dataclasses.fields(value)])


class _Fakes(FakeTensorMode):
    """Tensors without values, and how much memory they would take."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        # Tensors of one device move together; what lies elsewhere stays elsewhere, as the call would complain.
        self.usual = given[0].device if given else torch.device("cpu")
        self.known: dict[int, FakeTensor] = {}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.own: set[int] = set()
        self.peak = 0

    def of(self, value: Any) -> Any:
        """An argument, with a stand-in for every tensor in it."""
        if isinstance(value, Tensor):
            return self._fake(value)
        if isinstance(value, QuantizedTensor | ops.Schedule):
            parts = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
            return type(value)(**self.of(parts))
        if isinstance(value, dict):
            return {name: self.of(part) for name, part in value.items()}
        if isinstance(value, tuple | list) and any(True for _ in _tensors(value)):
            return type(value)(self.of(part) for part in value)
        return value

    def _fake(self, real: Tensor) -> Tensor:
        if real.layout != torch.strided or type(real) not in (Tensor, torch.nn.Parameter):
            return real  # the call says what it thinks of it
        if id(real) not in self.known:
            bare = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            # torch without CUDA refuses to index what says that it is there.
            fake = FakeTensor(self, bare, torch.device("cpu") if real.device == self.usual else real.device)
            fake.requires_grad_(real.requires_grad)
            fake.stands_for = real  # type: ignore[attr-defined]
            self.own.add(fake.untyped_storage()._cdata)
            self.known[id(real)] = fake
        return self.known[id(real)]

    def held(self, value: Any) -> int:
        """Bytes of new memory in tensors of a value."""
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(value)}
        return sum(size for storage, size in found.items() if storage not in self.own)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.own:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@dataclasses.dataclass
class _Entry:
    """What is known of one kernel of the call."""

    decision: Decision
    optional: bool
    rehearsal: backends.Rehearsal
    launches: int = 0
    grid: tuple[int, ...] | None = None
    sizes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        """Whether the call would have ended here."""
        return self.decision.chosen is None and not self.optional

    def __call__(self, *arguments: Any) -> None:
        """In the place of the kernel."""
        chosen = self.decision.chosen
        if self.launches == 0 and chosen is not None:
            self.grid = grids.grid_of(chosen.cell, chosen.variant, arguments)
            named = dict(zip(grids.names_of(chosen.cell), arguments, strict=False))
            self.sizes = {name: tuple(value.shape) for name, value in named.items() if isinstance(value, Tensor)}
            self.numbers = {name: value for name, value in named.items() if type(value) is int}
        self.launches += self.rehearsal.times


class _Met:
    """Answers whoever looks for a kernel."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.rehearsal = backends.Rehearsal()
        self.found: dict[tuple[Any, ...], _Entry] = {}

    @property
    def entries(self) -> list[_Entry]:
        return list(self.found.values())

    def __call__(self, decision: Decision, needed: bool) -> _Entry | None:
        call = decision.call
        key = (call.op, call.precision, tuple(call.variant.items()), call.features, call.refusals)
        entry = self.found.setdefault(key, _Entry(decision, not needed, self.rehearsal))
        entry.optional &= not needed
        return entry if needed or decision.chosen is not None else None


def _report(
    op: str,
    operator: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    met: _Met,
    facts: DeviceFacts,
    registry: Registry,
    memory: tuple[int, int],
    notes: list[str],
) -> Explanation:
    bound = inspect.signature(operator).bind(*arguments, **named).arguments
    backend = bound.get("backend", "auto")
    runs = "kernels"
    if backend == "reference" or (facts.target is None and not met.entries):
        runs = REFERENCE
    elif op == "dense_attention":
        runs = BORROWED
    elif not met.entries:
        runs = NOTHING
    workspace, results = memory
    expected: dict[int, Expectation] = {}
    if met.entries and facts.target is not None:
        sequences, assumed = sequences_of(bound)
        if sequences is not None:
            sizes = _sizes(bound, met)
            for entry in met.entries:
                found = _expected(entry, sizes, sequences, facts, bound, registry)
                if found is not None:
                    expected[id(entry)] = found
            notes += assumed
    if bound.get("batch_invariant"):
        notes.append(
            "batch_invariant: the bits of a row depend on nothing else in the batch; calls without it were timed."
        )
    notes += _of_copy(op, bound, met, registry)
    if any(entry.stopped for entry in met.entries) and (remedy := _remedy(op, met, facts, registry)):
        notes.append(remedy)
    stopped = any(entry.stopped for entry in met.entries)
    chosen = {entry.decision.chosen.cell.tree for entry in met.entries if entry.decision.chosen is not None}
    outdated = (tree for tree in registry.outdated if stopped or tree in chosen)
    notes += [f"Out of date: {trees.told_outdated(tree)}" for tree in outdated]
    whole = _whole(op, met, expected, facts, registry)
    notes += _never_timed(met, expected, whole)
    kernels = tuple(_launched(entry, op, registry, expected.get(id(entry))) for entry in met.entries)
    known = None if runs in (REFERENCE, BORROWED) else workspace
    return Explanation(op, str(facts), facts.target, runs, kernels, known, results, whole, tuple(notes))


def _of_copy(op: str, bound: Mapping[str, Any], met: _Met, registry: Registry) -> list[str]:
    """Says where the call attends to a copy into which scales are rounded."""
    copies = [entry.decision.call for entry in met.entries if entry.decision.call.op == COPIER and entry.launches]
    if op == COPIER or not copies:
        return []
    stored = registry.precisions[copies[0].precision].formats["key_value"]
    # Elements of 4 bits times the scales of their groups are exact in bfloat16.
    outer = [getattr(bound[name], "global_scale", None) for name in ("k", "v")]
    return [] if stored in GROUPS and outer == [None, None] else [rounded_copy(stored)]


def _remedy(op: str, met: _Met, facts: DeviceFacts, registry: Registry) -> str:
    """How kernels that a call lacks can be generated, for a target that has them on request; empty where none can."""
    from msa_tiles.codegen import Selection, lacks

    precisions = [entry.decision.call.precision for entry in met.entries]
    named = [name for name in dict.fromkeys(precisions) if name in registry.precisions]
    if facts.target is None or not named:
        return ""
    selection = Selection(WHOLES.get(op, (op,)), (), (), named)
    return lacks.ungenerated(facts.target, selection, {cell.id for cell in registry.cells})


def _sizes(bound: Mapping[str, Any], met: _Met) -> dict[str, tuple[int, ...]]:
    """The shapes of a call's tensors by name, and of the ids, which a call may choose itself."""
    chosen = [entry.sizes["block_indices"] for entry in met.entries if "block_indices" in entry.sizes]
    ids = {"block_indices": chosen[0]} if chosen else {}
    own = {name: value for name, value in bound.items() if isinstance(value, Tensor | QuantizedTensor)}
    return {**ids, **{name: tuple(value.shape) for name, value in own.items()}}


def _expected(
    entry: _Entry,
    sizes: Mapping[str, tuple[int, ...]],
    sequences: list[tuple[int, int]],
    facts: DeviceFacts,
    bound: Mapping[str, Any],
    registry: Registry,
) -> Expectation | None:
    chosen, call = entry.decision.chosen, entry.decision.call
    if chosen is None or entry.launches == 0 or call.op in PARTIAL:
        return None
    compute = chosen.cell.entry["compute"]
    causal = bool(bound.get("causal", True))
    known = {**sizes, **entry.sizes}
    dims = {**entry.numbers, **call.variant}
    floor = expect.floor_ms(call.op, chosen.cell.precision, compute, dims, known, sequences, facts, causal)
    if not floor:
        return None
    # Rows are of calls, and no call is of a form of kernels.
    found = expect.expectation(call.op, registry.called(chosen.cell.precision), chosen.cell.dsl, floor, facts)
    own = None if found.ms is not None else expect.timed(chosen, floor, sequences, facts, registry, causal)
    return own or found


def _never_timed(met: _Met, expected: Mapping[int, Expectation], whole: Expectation | None) -> list[str]:
    """Says of which kernels the times are not, where there are times: most that was measured are the shipped ones."""
    told = (whole, *expected.values())
    of_others = [entry for entry in met.entries if id(entry) not in expected or expected[id(entry)].workload is None]
    chosen = [entry.decision.chosen for entry in of_others if entry.launches]
    own = dict.fromkeys(f"{each.cell.id} of {each.cell.tree}" for each in chosen if each and each.cell.tree is not None)
    if not own or all(each is None or each.ms is None for each in told):
        return []
    what = "is another one" if len(own) == 1 else "are others"
    return [f"Times are estimates from what shipped kernels took: {', '.join(own)} {what}."]


def _whole(
    op: str, met: _Met, expected: Mapping[int, Expectation], facts: DeviceFacts, registry: Registry
) -> Expectation | None:
    """Of the call: that of its operator, which holds for all of its kernels, or of those that it is made of."""
    of = {entry.decision.call.op: expected[id(entry)] for entry in met.entries if id(entry) in expected}
    if op in of:
        return of[op]
    launched = {entry.decision.call.op for entry in met.entries if entry.launches}
    known = [of.get(part) for part in WHOLES.get(op, ()) if part in launched]
    parts = [part for part in known if part is not None]
    if not parts or len(parts) < len(known):
        return None
    floor = sum(part.floor_ms for part in parts)
    if op in TIMED:
        cells = [entry.decision.chosen.cell for entry in met.entries if entry.launches and entry.decision.chosen]
        of_parts = [next(cell for cell in cells if cell.op == part) for part in WHOLES[op] if part in launched]
        precision = "+".join(dict.fromkeys(registry.called(cell.precision) for cell in of_parts))
        timed = expect.expectation(op, precision, of_parts[-1].dsl, floor, facts)
        if timed.rows:
            return timed
    if any(part.ms is None for part in parts):
        return Expectation(floor, parts[0].device)
    within = [part.within for part in parts if part.within is not None]
    ms = sum(part.ms for part in parts if part.ms is not None)
    rows = sum(part.rows for part in parts)
    return Expectation(floor, parts[0].device, ms, max(within, default=None), rows, parts[0].card)


def _launched(entry: _Entry, op: str, registry: Registry, expectation: Expectation | None) -> Launched:
    decision, chosen = entry.decision, entry.decision.chosen
    notes: list[str] = []
    if decision.call.widened:
        notes.append(widening(decision.call.precision))
    origin = place = None
    if chosen is not None:
        origin, place = origin_of(chosen, registry)
        notes += packs.mismatches(chosen.cell, chosen.variant)
    return Launched(
        op=decision.call.op,
        precision=decision.call.precision if chosen is None else chosen.cell.precision,
        cell=None if chosen is None else chosen.cell.id,
        tree=None if chosen is None or chosen.cell.tree is None else str(chosen.cell.tree),
        variant=dict(decision.call.variant if chosen is None else chosen.variant),
        origin=origin,
        place=place,
        file=None if chosen is None else str(chosen.cell.file),
        launches=entry.launches,
        grid=entry.grid,
        asked=tuple(
            Asked(each.cell.id, dict(each.variant), each.refusal, decision.why_not(each))
            for each in decision.candidates
        ),
        optional=entry.optional,
        expectation=None if decision.call.op == op else expectation,
        notes=tuple(notes),
        tolerance={} if chosen is None else dict(chosen.cell.entry["tolerance"]),
        errors=() if chosen is None else tuple(accuracies_of(chosen.cell, registry)),
    )


def origin_of(candidate: Candidate, registry: Registry) -> tuple[str, str | None]:
    """Where the kernel of a call comes from: "pack" and which, "cache", or "compile".

    Raises PackError for a kernel whose file in a pack, or the runtime library beside it, is not what was packed.
    """
    if candidate.packed is not None:
        for name in (candidate.packed.library.name, packs.RUNTIME):
            candidate.packed.pack.checked(name)
        return "pack", str(candidate.packed.pack.directory)
    entry = find_compiled(candidate.cell, candidate.variant, registry.targets[candidate.cell.target].arch)
    return ("cache" if entry else "compile"), None
