"""`msa-tiles explain`: which kernel would serve a call, and why the others would not."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_tiles import console, trees
from msa_tiles.commands._options import (
    add_json,
    add_names,
    add_variant,
    at_least,
    known_names,
    refuse_ungenerated,
    ungenerated,
)
from msa_tiles.commands.support import is_generated
from msa_tiles.names import check, unknown
from msa_tiles.spec.model import DSLS

if TYPE_CHECKING:
    import torch

    from msa_tiles.runtime.dispatch import Candidate, Decision
    from msa_tiles.runtime.facts import DeviceFacts
    from msa_tiles.runtime.registry import Cell, Registry

DENSE = "dense_attention"  # has no kernels of its own
MOST_TOKENS, MOST_REQUESTS = (1 << 31) - 1, 1 << 20  # packed starts are int32
SIZES = {"block_size", "head_dim", "index_dim", "group", "heads_per_group", "topk"}  # dims that are those of tensors
USUAL_BLOCK = 128
PAGED, PAGES = "paged", "pages_per_block"


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("explain", help="show which kernel serves a call, and why", description=__doc__)
    parser.add_argument("op", metavar="OP", help="operator, for example sparse_attention")
    parser.add_argument(
        "--device",
        help="cuda, cuda:1, a target such as sm90, or a card such as H100 (default: the GPU here, else the target with "
        "most kernels)",
    )
    parser.add_argument(
        "--precision",
        help="precision of the call, its group, or a pair such as q8k8+q16kv8: that of index keys + that of keys and "
        "values (default bf16, or the first that the operator has)",
    )
    add_variant(parser, "compile-time dims of the call, such as group=8; the rest are those of MiniMax M3")
    add_names(parser, "--feature", "NAME,…", "what the call needs, such as paged")
    parser.add_argument(
        "--queries",
        type=int,
        metavar="N",
        help="query tokens of each request: then launches, grids, memory and the time to expect are shown",
    )
    parser.add_argument("--keys", type=int, metavar="N", help="keys of each request (default: as many as queries)")
    parser.add_argument("--requests", type=int, metavar="N", help="requests of the call (default 1)")
    parser.add_argument("--backend", default="auto", help="auto, tilelang or cutedsl (default auto)")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="with --queries: a call with batch_invariant=True"
    )
    parser.add_argument(
        "--as-if-installed",
        action="store_true",
        help="answer as if both DSLs were installed here, for another machine that has them",
    )
    add_json(parser, "what is shown")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if not args.as_if_installed:
        return _run(args)
    from msa_tiles.runtime.dispatch import as_if_installed

    with as_if_installed():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch

    from msa_tiles import ops as operators
    from msa_tiles.explaining.report import BORROWED, IN_WORDS
    from msa_tiles.runtime import pairs
    from msa_tiles.runtime.facts import card_facts, device_facts, target_facts
    from msa_tiles.runtime.parts import PARTS, parts_of
    from msa_tiles.runtime.registry import default_registry
    from msa_tiles.spec.cards import unknown_device

    registry = default_registry()
    if args.op == DENSE:
        told = {"op": DENSE, "runs": BORROWED}
        console.say(json.dumps(told, indent=1) if args.json else f"{DENSE} {IN_WORDS[BORROWED]}.")
        return 0
    ops = [part for part in parts_of(args.op) if registry.of(part)]
    if not ops:
        whole = (op for op in PARTS if any(map(registry.of, parts_of(op))))
        raise ValueError(unknown("operator", args.op, sorted({*whole, *(cell.op for cell in registry.cells), DENSE})))
    if args.precision is None:
        own = [cell.precision for cell in registry.of(args.op)]
        args.precision = own[0] if own and "bf16" not in own else "bf16"
    known = known_names(registry)
    check("--precision", args.precision.split("+"), known["precision"])
    forms = [_form_note(args.op, *form, registry) for form in pairs.forms_in(args.precision, registry).items()]
    args.precision = pairs.called_as(args.precision, registry)
    forms += [told for name in args.precision.split("+") for told in _unreachable(name, registry)]
    # Without sizes kernels say themselves why they refuse a precision.
    try:
        asked = pairs.asked_of("--precision", args.op, args.precision, registry, refused=args.queries is None)
    except ValueError as error:
        raise ValueError("; ".join([*forms, str(error)])) from error
    check("--feature", args.feature, known["feature"])
    check("--backend", [args.backend], ("auto", *DSLS))
    _check_sizes(args)
    usual = collections.Counter(cell.target for cell in registry.cells).most_common(1)[0][0]
    name = ("cuda" if torch.cuda.is_available() else usual) if args.device is None else args.device
    of_torch = name.partition(":")[0] in ("cpu", "cuda")
    if not of_torch:
        refuse_ungenerated("--device", [name], registry)
    if name in registry.targets:
        torch_device, device = torch.device("cuda"), target_facts(registry.targets[name])
    elif not of_torch and (card := card_facts(name)) is not None:
        torch_device, device = torch.device("cuda"), card
    else:
        try:
            torch_device = torch.device(name)
            device = device_facts(torch_device, registry.targets.values())
        except (RuntimeError, AssertionError) as error:
            if not of_torch:
                raise ValueError(unknown_device("--device", name, registry.targets)) from error
            targets = ", ".join(registry.targets)
            raise ValueError(f"--device {name}: {error}; a target needs no GPU: {targets}") from error
    _check_variant(args, ops, registry)
    if args.device is None and name != "cuda":
        (console.note if args.json else console.say)(f"no CUDA device here: as if on {name}")
    if args.queries is not None:
        return _rehearse(args, asked, name, registry, forms)
    for sentence in forms:
        (console.note if args.json else console.say)(sentence)
    if torch_device.type != "cuda" and args.op in operators.__all__:
        return _on_reference(args, asked, torch_device, device, registry)
    shown = [_decide(op, precision, args, registry, torch_device, device) for op, precision in asked.items()]
    if args.json:
        console.say(json.dumps([_described(decision, registry) for decision in shown], indent=1))
    elif registry.of(args.op):
        _show(shown[0], asked[args.op], args, registry)
    else:
        pair = pairs.pair_of("--precision", args.precision, registry)
        console.say(f"{args.op} in {pair.in_words()} may launch kernels of {', '.join(asked)}.")
        for op in ops:
            if op not in asked:
                console.say(f"It launches none of {op}, which has kernels of {pairs.precisions_of(registry.of(op))}.")
        for decision in shown:
            console.say()
            _show(decision, asked[decision.call.op], args, registry)
    _say_missing((each.refusal for decision in shown for each in decision.candidates), name, args)
    return 0 if all(decision.chosen is not None for decision in shown) else 1


def _form_note(op: str, form: str, called: str, registry: Registry) -> str:
    """Says of a form of kernels that was named which calls run it.

    Raises ValueError for an operator with kernels of its own that reads no tensors stored so.
    """
    from msa_tiles.runtime.pairs import form_text, precisions_of, serving_cells
    from msa_tiles.runtime.parts import parts_of

    if (own := registry.of(op)) and not serving_cells(op, called, registry):
        raise ValueError(
            f"--precision {form}: {op} has no kernels of it, nor of {called}, of which it is a form, only of "
            f"{precisions_of(own)}"
        )
    if any(registry.select(part, precision=form) for part in parts_of(op)):
        which = f"calls of {called} run whichever of their kernels is faster on record"
    else:
        which = f"{op} has none of it"
    return f"{form_text(form, called)}; {which}"


def _unreachable(name: str, registry: Registry) -> Iterator[str]:
    """Says of the formats of a precision which no call passes tensors of."""
    from msa_tiles.call.formats import CALLED, told_by_calls

    formats = registry.precisions[name].formats.values() if name in registry.precisions else ()
    for format in dict.fromkeys(each for each in formats if each in registry.formats):
        if not told_by_calls(format, storage := registry.formats[format]["storage"]):
            yield (
                f"No call passes tensors of the format {format}, of {storage}, so that none runs these kernels: "
                f"those of calls are of {CALLED}."
            )


def _on_reference(
    args: argparse.Namespace,
    asked: Mapping[str, str],
    torch_device: torch.device,
    device: DeviceFacts,
    registry: Registry,
) -> int:
    """A call of tensors that are on no GPU, which no kernel has to serve."""
    from msa_tiles.call import backends
    from msa_tiles.explaining.report import IN_WORDS, REFERENCE

    backends.check(args.backend, torch_device)
    if args.json:
        decisions = (_decide(op, name, args, registry, torch_device, device) for op, name in asked.items())
        described = [_described(decision, registry) | {"runs": REFERENCE} for decision in decisions]
        console.say(json.dumps(described, indent=1))
    else:
        console.say(f"{args.op} on {device}\n  {IN_WORDS[REFERENCE]}")
    return 0


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError for sizes that no call has, or that say nothing without the number of queries."""
    for option, value, most in (
        ("--queries", args.queries, MOST_TOKENS),
        ("--keys", args.keys, MOST_TOKENS),
        ("--requests", args.requests, MOST_REQUESTS),
    ):
        if value is not None and not 0 <= value <= most:
            raise ValueError(f"{option} is {value:,}, wanted 0 to {most:,}")
    requests = 1 if args.requests is None else args.requests
    at_least("--requests", requests, 1)
    if args.queries is None and args.batch_invariant:
        raise ValueError("--batch-invariant needs --queries: the query tokens of each request")
    if args.queries is None and (args.keys, args.requests) != (None, None):
        raise ValueError("--keys and --requests need --queries: the query tokens of each request")
    for option, value in (("--queries", args.queries), ("--keys", args.keys)):
        if (total := (value or 0) * requests) > MOST_TOKENS:
            raise ValueError(
                f"{option} {value} of each of --requests {requests} are {total:,} tokens, "
                f"wanted at most {MOST_TOKENS:,}"
            )


def _check_variant(args: argparse.Namespace, ops: Sequence[str], registry: Registry) -> None:
    """Raise ValueError for compile-time dims that there are not, or that contradict a feature."""
    given = dict(args.variant)
    dims = {dim for op in ops for cell in registry.of(op) for dim in cell.variants}
    if PAGED in given and not any(PAGED in cell.variants for cell in registry.of(args.op)):
        raise ValueError(f"--variant {PAGED} is a dim of a kernel that {args.op} may launch; say --feature {PAGED}")
    check(f"--variant of {args.op}:", given, sorted(dims))
    for dim in (PAGES, PAGED):
        if PAGED in args.feature and given.get(dim) == 0:
            raise ValueError(f"--variant {dim}=0 says that keys are flat, --feature {PAGED} that they are not")


def _check_dims(args: argparse.Namespace, dims: Mapping[str, int]) -> None:
    """Raise ValueError for compile-time dims that tensors of no size have."""
    given = dict(args.variant)
    for dim in SIZES & given.keys():
        at_least(f"--variant {dim}", given[dim], 1)
    block, pages = dims.get("block_size", USUAL_BLOCK), dims.get("pages_per_block", 0)
    if pages and block % pages:
        raise ValueError(f"--variant pages_per_block is {pages}, wanted 0, or a divisor of block_size = {block}")


def _rehearse(
    args: argparse.Namespace, asked: Mapping[str, str], name: str, registry: Registry, forms: Sequence[str]
) -> int:
    """A dry run of a call of these sizes; `forms` are notes on what was named."""
    from msa_tiles import ops as operators
    from msa_tiles.explaining import explain
    from msa_tiles.explaining.examples import call_of
    from msa_tiles.runtime.compiler import variant_text
    from msa_tiles.runtime.pairs import model_of, pair_of

    if args.op not in operators.__all__:
        raise ValueError(f"--queries: {args.op} is no operator to call, only a kernel of one; leave --queries out")
    if set(args.feature) - {PAGED}:
        raise ValueError(f"--feature {','.join(args.feature)}: with --queries only paged can be said; leave one out")
    cells = [model_of(op, asked[op], registry) for op in reversed(list(asked))]
    dims = {dim: value for cell in cells for dim, value in cell.ci[0].items()} | dict(args.variant)
    if PAGED in args.feature and not dims.get(PAGES):
        dims[PAGES] = 1
    keys = args.queries if args.keys is None else args.keys
    requests = 1 if args.requests is None else args.requests
    pair = pair_of("--precision", args.precision, registry)
    _check_dims(args, dims)
    options = {} if args.op == "build_schedule" else {"backend": args.backend}
    if args.batch_invariant:
        if not _takes(args.op, "batch_invariant"):
            others = [op for op in operators.__all__ if _takes(op, "batch_invariant") and _takes(op, "backend")]
            raise ValueError(
                f"--batch-invariant: {args.op} has no such argument, leave it out; {', '.join(others)} have it"
            )
        options["batch_invariant"] = True
    try:
        call = call_of(args.op, dims, pair, args.queries, keys, requests, registry)
        told = explain(getattr(operators, args.op), **call, **options, device=name)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{args.op} takes no call of {variant_text(dims)}: {error}") from error
    told = dataclasses.replace(told, notes=(*forms, *told.notes))
    console.say(json.dumps(told.to_dict(), indent=1) if args.json else str(told))
    _say_missing((each.refusal for kernel in told.kernels for each in kernel.asked), name, args)
    return 0 if told.served else 1


def _decide(
    op: str,
    asked: str,
    args: argparse.Namespace,
    registry: Registry,
    torch_device: torch.device,
    device: DeviceFacts,
) -> Decision:
    """Which of an operator's kernels would run for a call in a precision or group."""
    from msa_tiles.runtime.dispatch import decide
    from msa_tiles.runtime.facts import CallFacts
    from msa_tiles.runtime.pairs import model_of

    model, serving = model_of(op, asked, registry), registry.serving(op, asked)
    own = {dim for cell in registry.of(op) for dim in cell.variants}
    given = {dim: value for dim, value in args.variant if dim in own}
    features = frozenset(args.feature)
    features -= {"k_offset"} if _takes_shards(op) else set()
    # A group stands for the first precision in which the operator has kernels.
    precision = serving if serving in registry.precisions else model.precision
    variant = {**model.ci[0], **given}
    # A kernel's dim and the feature of a call say the same.
    for dim in variant.keys() & {PAGES, PAGED}:
        if PAGED in features:
            variant[dim] = variant[dim] or 1
        elif variant[dim]:
            features |= {PAGED}
    call = CallFacts(op, torch_device, precision, variant, features, widened=serving != asked)
    return decide(call, device, registry, args.backend)


def _described(decision: Decision, registry: Registry) -> dict[str, Any]:
    """A decision as `explain --json` prints it."""
    from msa_tiles.runtime import evidence
    from msa_tiles.runtime.accuracy import accuracies_of

    chosen = decision.chosen
    return {
        "op": decision.call.op,
        "device": str(decision.device),
        "target": decision.device.target,
        "precision": decision.call.precision,
        "widened": decision.call.widened,
        "variant": dict(decision.call.variant),
        "features": sorted(decision.call.features),
        "runs": None if chosen is None else chosen.cell.id,
        "file": None if chosen is None else str(chosen.cell.file),
        "tolerance": None if chosen is None else dict(chosen.cell.entry["tolerance"]),
        "errors": [] if chosen is None else [dataclasses.asdict(e) for e in accuracies_of(chosen.cell, registry)],
        "kernels": [
            {
                "cell": each.cell.id,
                "tree": None if each.cell.tree is None else str(each.cell.tree),
                "variant": dict(each.variant),
                "refusal": each.refusal,
                "why_not": decision.why_not(each),
                "origin": None if each.refusal is not None else _origin(each, registry),
                "verified": evidence.has_run(each.cell, registry),
                "edited": each.refusal is None and not is_generated(each.cell),
                "outdated": each.cell.tree in registry.outdated,
            }
            for each in decision.candidates
        ],
        "measured": None
        if decision.figure is None
        else {**dataclasses.asdict(decision.figure), "variant": _timed(decision)},
    }


def _timed(decision: Decision) -> dict[str, int]:
    """The compile-time dims at which `tune` times kernels: those of the M3 shape, whatever the call's are."""
    return {} if decision.chosen is None else dict(decision.chosen.cell.ci[0])


def _show(decision: Decision, asked: str, args: argparse.Namespace, registry: Registry) -> None:
    """One operator's kernels for a call in a precision or group, as text."""
    from msa_tiles.explaining.report import widening
    from msa_tiles.runtime import accuracy, evidence, packs
    from msa_tiles.runtime.compiler import variant_text

    call, op = decision.call, decision.call.op
    needs = f", needs {', '.join(sorted(call.features))}" if call.features else ""
    console.say(f"{op} on {decision.device}: {call.precision}, {variant_text(call.variant)}{needs}")
    if call.widened:
        console.say(f"  {asked}: {widening(call.precision)}")
    if "k_offset" in args.feature and _takes_shards(op):
        console.say("  k_offset: the operator hands its kernel the shard as a call of its own")
    for candidate in decision.candidates:
        name = candidate.cell.id + _whence(candidate.cell, registry)
        if candidate.refusal is not None:
            console.say(f"  {name}: refuses: {candidate.refusal}")
            continue
        text = f"serves it as {variant_text(candidate.variant)}, {_origin(candidate, registry)}"
        text += "" if evidence.has_run(candidate.cell, registry) else ", not verified"
        why_not = decision.why_not(candidate)
        console.say(f"  {name}: {text}" + ("" if why_not is None else f"; does not run: {why_not}"))
        if not is_generated(candidate.cell):
            console.say("    its file is not what `msa-tiles generate` writes: no evidence holds for it")
        for sentence in packs.mismatches(candidate.cell, candidate.variant):
            console.say(f"    {sentence}")
    if decision.chosen is None:
        console.say("No kernel serves this call. CPU tensors, and backend='reference', run on msa_tiles.reference.")
        if device_target := decision.device.target:
            _say_served(decision, args, registry)
            _say_remedy(registry, [op], device_target, call.precision)
        _say_outdated(registry.outdated)
        return
    if decision.figure is not None:
        figure = decision.figure
        fresh = {c.cell.id for c in decision.candidates if figure.fresh(c.cell)}
        timed = ", ".join(
            f"{name} {ms:.4g} ms" + ("" if name in fresh else " (another digest)") for name, ms in figure.ms.items()
        )
        other = "" if figure.precision == call.precision else f", {figure.precision}, which tells the faster DSL"
        differing = {name: value for name, value in _timed(decision).items() if decision.chosen.variant[name] != value}
        shape = f", at {variant_text(differing)}" if differing else ""
        console.say(f"Measured on {figure.card}, {figure.workload}{shape}{other}: {timed}")
    cell = decision.chosen.cell
    console.say(f"Runs {cell.id}, from {cell.file}")
    console.say(f"  {accuracy.in_words(accuracy.accuracies_of(cell, registry), cell.entry['tolerance'])}")
    _say_outdated(tree for tree in registry.outdated if tree == decision.chosen.cell.tree)


def _say_missing(refusals: Iterable[str | None], device: str, args: argparse.Namespace) -> None:
    """Says of another machine's device whose kernels do not run here what the answer is of."""
    from msa_tiles.runtime import toolchain

    reasons = {dsl: toolchain.missing(dsl) for dsl in DSLS}
    told = [refusal for refusal in refusals if refusal is not None]
    lacking = [dsl for dsl, why in reasons.items() if why and any(refusal.startswith(why) for refusal in told)]
    if lacking and device.partition(":")[0] not in ("cpu", "cuda"):
        (console.note if args.json else console.say)(
            f"This is the answer of this machine, where what these DSLs need is not installed: {', '.join(lacking)}; "
            "--as-if-installed answers for one that has both DSLs."
        )


def _say_outdated(directories: Iterable[Path]) -> None:
    for directory in directories:
        console.say(f"Out of date: {trees.told_outdated(directory)}")


def _say_served(decision: Decision, args: argparse.Namespace, registry: Registry) -> None:
    """In which precisions kernels would serve a call that none does in its own."""
    from msa_tiles.runtime import pairs

    call, target = decision.call, decision.device.target
    dsl = "" if args.backend == "auto" else f"{args.backend} "
    there = registry.select(call.op, dsl.strip() or None, target)
    if not pairs.alike(there, call.precision, registry):
        what = f"{dsl}kernels of {pairs.precisions_of(there)}" if there else f"no {dsl}kernels"
        console.say(f"On {target} {call.op} has {what}.")


def _say_remedy(registry: Registry, ops: Sequence[str], target: str, *precisions: str) -> None:
    """How kernels come that the target has on request."""
    if remedy := ungenerated(registry, ops, [target], precisions):
        console.say(remedy)


def _whence(cell: Cell, registry: Registry) -> str:
    """Which tree a kernel is of; empty for a shipped one."""
    if cell.tree is None:
        return ""
    place = ", in place of the one beneath" if cell.replaces else ""
    age = ", out of date" if cell.tree in registry.outdated else ""
    return f" (of the tree {cell.tree}{place}{age})"


def _origin(candidate: Candidate, registry: Registry) -> str:
    """Where the kernel of a call comes from: a pack, the cache, or a compiler."""
    from msa_tiles.explaining.rehearsal import origin_of
    from msa_tiles.explaining.report import ORIGINS

    origin, place = origin_of(candidate, registry)
    return ORIGINS[origin].format(place)


def _takes_shards(op: str) -> bool:
    """Whether the operator takes k_offset; it then rewrites such calls, and no kernel needs to know of it."""
    return _takes(op, "k_offset")


def _takes(op: str, argument: str) -> bool:
    """Whether there is an operator to call of that name, with an argument of that name."""
    from msa_tiles import ops

    function = getattr(ops, op, None)
    return inspect.isfunction(function) and argument in inspect.signature(function).parameters
