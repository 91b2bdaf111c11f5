"""Which kernels a call launches, and those that an application needs before its first call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from msa_tiles.names import check, unknown
from msa_tiles.runtime import tuned
from msa_tiles.runtime.build import Job, build
from msa_tiles.runtime.compiler import CompileError
from msa_tiles.runtime.registry import Cell, Registry, default_registry
from msa_tiles.runtime.workers import most_workers
from msa_tiles.spec.cards import unknown_target
from msa_tiles.spec.model import DSLS

if TYPE_CHECKING:
    from msa_tiles.runtime.dispatch import Candidate, Decision

_SCHEDULED = (
    *("build_schedule", "combine", "dequantize_kv", "shared_attention", "sparse_attention", "split_selection"),
)
# Compile-time dims that a call does not name: they follow from its lengths, or from its other dims.
FOLLOWING = ("max_blocks", "paged", "prefix", "scored_blocks", "tile_tokens")
# Makes a copy in bfloat16 of quantised keys and values, which is flat; and those that then run on that.
COPIER = "dequantize_kv"
OF_COPIES = ("shared_attention", "sparse_attention")
# Operators whose kernels a call launches, besides or in place of its own.
PARTS: Mapping[str, tuple[str, ...]] = {
    "sparse_attention": _SCHEDULED,
    "shared_attention": _SCHEDULED,
    "sparse_decode": ("combine",),
    "sparse_attention_backward": ("build_schedule", "gradient_rows", "merge_gradients"),
    "index_kl": ("build_schedule", "index_lse", "index_gradients"),
    "msa_decode": ("decode_score", "decode_topk", "sparse_decode", "combine"),
    "msa_attention": (
        *("select_blocks", *_SCHEDULED, "sparse_attention_backward", "gradient_rows", "merge_gradients"),
        *("index_kl", "index_lse", "index_gradients"),
    ),
}
# Operators without kernels of their own, and those that no call of them does without.
WHOLES: Mapping[str, tuple[str, ...]] = {
    "msa_decode": ("decode_score", "sparse_decode"),
    "msa_attention": ("select_blocks", "sparse_attention", "index_kl"),
}


class UnservedError(ValueError):
    """No kernel serves a call that was named: of an operator, in a precision or group, or ``any``."""

    def __init__(self, sentence: str, op: str, precision: str) -> None:
        super().__init__(sentence)
        self.op, self.precision = op, precision


def parts_of(op: str) -> tuple[str, ...]:
    """The operators whose kernels a call of `op` may launch, its own first where it has some."""
    return tuple(dict.fromkeys((op, *PARTS.get(op, ()))))


def variants_at(cell: Cell, fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The variants of a cell that serve these dims, with every value of its other dims; none where they serve none."""
    choices = []
    for name, values in cell.variants.items():
        if name not in fixed:
            choices.append(values)
        elif name in cell.capacity:
            choices.append(tuple(sorted(value for value in values if value >= fixed[name])[:1]))
        else:
            choices.append(tuple(value for value in values if value == fixed[name]))
    for point in itertools.product(*choices):
        yield dict(zip(cell.variants, point, strict=True))


def jobs_for(call: str, registry: Registry, target: str, argument: str = "--for", backend: str = "auto") -> list[Job]:
    """The kernels that a call may launch on a target and no pack has, of the DSLs that are installed.

    `sparse_attention,precision=q16kv8,group=8,pages_per_block=1`: an operator, or `msa_decode` or `msa_attention`; its
    precision (bf16), a pair such as `q8k8+q16kv8`, or `any`; dims that differ from those of the M3 shape. Of those that
    follow from a call's lengths or from other dims every value is taken. A form of kernels that is named, such as
    `q16k4m8`, stands in the place of those that calls of its tensors run. The `backend` is the call's: of a DSL, which
    helpers are of where it has them.

    Raises ValueError, which names the `argument`, for what is no call, and UnservedError for a call that no kernel
    serves, or a part of which none does.
    """
    from msa_tiles.runtime.pairs import KEYS, alike, called_as, form_text, forms_in, pair_of  # which takes PARTS

    where = f"{argument} {call!r}" if not call.strip() else f"{argument} {call}"
    op, *settings = (word.strip() for word in call.split(","))
    told: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (value if name == "precision" else equals and value.isdigit()):
            raise ValueError(f"{where}: {setting!r} is not NAME=NUMBER or precision=NAME")
        if told.setdefault(name, value) != value:
            raise ValueError(f"{where}: {name} is {told[name]} and then {value}, and takes one value")
    precision = told.pop("precision", "bf16")
    given = {name: int(value) for name, value in told.items()}
    # Two targets of a tree may be of one architecture, and each other's kernels serve.
    arch = registry.targets[target].arch
    cells = [cell for part in parts_of(op) for cell in registry.of(part) if cell.arch == arch]
    if not cells:
        every = sorted({*PARTS, *(cell.op for cell in registry.cells)})
        if op not in every:
            raise ValueError(f"{where}: {unknown('operator', op, every)}")
        raise UnservedError(f"{where}: {op} has no kernels for {target}", op, precision)
    precisions = ["any", *registry.precisions, *(entry["group"] for entry in registry.formats.values())]
    check(f"{where}: precision", precision.split("+"), precisions)
    pair = pair_of(f"{where}: precision", precision, registry) if "+" in precision else None
    forms = forms_in(precision, registry)
    formed = {(cell.op, cell.precision) for cell in cells if cell.precision in forms}
    for form in forms.keys() - {name for _, name in formed}:
        none = f"{where}: {op} has no kernels of {form} on {target}; {form_text(form, forms[form])}"
        raise UnservedError(f"{none}: wanted precision={called_as(precision, registry)}", op, precision)
    dims = {name: value for cell in reversed(cells) for name, value in cell.ci[0].items()}
    check(f"{where}: the compile-time dim", given, sorted(dims))
    fixed = {name: value for name, value in dims.items() if name not in FOLLOWING} | given
    jobs: dict[str, Job] = {}
    asked: dict[str, list[Cell]] = {}
    served: set[str] = set()
    whole = WHOLES.get(op, (op,))
    copies = False
    for cell in cells:
        serving = registry.serving(cell.op, pair.of(cell.reads) or cell.precision if pair else precision)
        # Parts that read nothing quantised have one precision for all.
        itself = (cell.op, serving) in formed
        if itself and cell.precision != serving:
            continue
        named = serving in ("any", cell.precision, registry.group_of(cell.precision)) or set(cell.reads) <= {"output"}
        if named or (not KEYS.keys().isdisjoint(cell.reads) and alike([cell], serving, registry)):
            asked.setdefault(cell.op, []).append(cell)
            found = list(_serving(cell, fixed, registry, target, backend, itself))
            if not found and cell.op not in whole:
                found = list(_serving(cell, fixed, registry, target, "auto", itself))
            served |= {candidate.cell.op for candidate in found}
            copies |= cell.op == COPIER and bool(found)
            jobs |= _jobs(found)
    for cell in cells if copies else ():
        if cell.op in OF_COPIES and cell.precision == "bf16":
            jobs |= _jobs(_serving(cell, fixed | {"pages_per_block": 0}, registry, target, backend))
    # A precision of keys alone, or of index keys alone, is of those parts that read them.
    needed = [part for part in whole if part in asked] or [op]
    if lacking := [part for part in needed if part not in served]:
        parts = "" if lacking == [op] else f" of {' and '.join(lacking)}, which it launches,"
        why = [
            line for part in lacking for line in _refusals(part, asked.get(part, []), fixed, registry, target, backend)
        ]
        sentence = f"{where}: no kernel{parts} serves it on {target}{':' if why else ''}"
        raise UnservedError("\n  ".join([sentence, *why]), op, precision)
    return sorted(jobs.values(), key=lambda job: (DSLS.index(job.cell.dsl), str(job)))


def forms_of_call(call: str, registry: Registry) -> dict[str, str]:
    """The forms of kernels that a call names as `jobs_for` takes it, with the precisions that calls have instead."""
    from msa_tiles.runtime.pairs import forms_in

    settings = (word.strip().partition("=") for word in call.split(","))
    return forms_in(next((value for name, _, value in settings if name == "precision"), ""), registry)


def _jobs(found: Iterable[Candidate]) -> dict[str, Job]:
    """Those of them that no pack has."""
    some = (Job(each.cell, each.variant) for each in found if each.packed is None)
    return {str(job): job for job in some}


def _refusals(
    op: str, cells: Iterable[Cell], fixed: Mapping[str, int], registry: Registry, target: str, backend: str
) -> list[str]:
    """A line for each reason for which these kernels of an operator do not serve the dims, with those that give it.

    Where there are none of these, the precisions of those that there are.
    """
    from msa_tiles.runtime.pairs import precisions_of

    kernels: dict[str, list[str]] = {}
    for cell in cells:
        dims = {name: fixed.get(name, value) for name, value in cell.ci[0].items()}
        [answer] = (each for each in _decide(cell, dims, 0, registry, target, backend).candidates if each.cell is cell)
        kernels.setdefault(answer.refusal or "", []).append(cell.id)
    others = registry.select(op, target=target)
    if others and not kernels:
        return [f"{op} has kernels of {precisions_of(others)}"]
    return [f"{', '.join(names)}: {refusal}" for refusal, names in kernels.items()]


def _serving(
    cell: Cell, fixed: Mapping[str, int], registry: Registry, target: str, backend: str, itself: bool = False
) -> Iterator[Candidate]:
    """The kernels that run for a target's calls of a cell's operator and precision, at whatever number of queries.

    With `itself` those of this cell alone, whether or not they run.
    """
    if itself:
        for variant in variants_at(cell, fixed):
            candidates = _decide(cell, variant, 0, registry, target, backend).candidates
            yield from (each for each in candidates if each.cell is cell and each.refusal is None)
        return
    figures = (figure for figure in tuned.figures_of(*registry.directories) if figure.op == cell.op)
    sizes = sorted({0, *(tuned.bucket(figure.queries) for figure in figures)})
    for variant in variants_at(cell, fixed):
        for size in sizes:
            chosen = _decide(cell, variant, size, registry, target, backend).chosen
            if chosen is not None:
                yield chosen


def _decide(cell: Cell, dims: Mapping[str, int], size: int, registry: Registry, target: str, backend: str) -> Decision:
    """Which kernel runs for a target's calls of a cell's operator and precision with these dims."""
    # Here, because commands that list or compile kernels do without torch.
    import torch

    from msa_tiles.runtime.dispatch import decide
    from msa_tiles.runtime.facts import CallFacts, target_facts

    features = frozenset({"paged"} if dims.get("pages_per_block") else ())
    facts = CallFacts(cell.op, torch.device("cuda"), cell.precision, dims, features, size=size)
    return decide(facts, target_facts(registry.targets[target]), registry, backend)


def warm(*calls: str, target: str | None = None, jobs: int | None = None) -> int:
    """Compile what calls need into the cache, side by side, and return how many kernels that are.

    Calls are written as for `jobs_for`; the target is that of the current GPU where none is named.

    Raises ValueError for a call that no kernel serves, CompileError when one does not compile.
    """
    import torch

    from msa_tiles.runtime.facts import device_facts

    registry = default_registry()
    if target is None and not torch.cuda.is_available():
        raise ValueError(f"target is None, and there is no CUDA device; name one of {', '.join(registry.targets)}")
    if target is None:
        target = device_facts(torch.device("cuda"), registry.targets.values()).target
    if target is None:
        raise ValueError(f"target is None and no target serves this GPU; there are {', '.join(registry.targets)}")
    if target not in registry.targets:
        raise ValueError(unknown_target("target", target, registry.targets))
    wanted = {str(job): job for call in calls for job in jobs_for(call, registry, target, "call")}
    outcomes = build(wanted.values(), registry.targets, workers=jobs or most_workers(), audited=False)
    failed = [f"{outcome.job}: {outcome.complaints[0]}" for outcome in outcomes if not outcome.good]
    if failed:
        raise CompileError("; ".join(failed))
    return len(wanted)
