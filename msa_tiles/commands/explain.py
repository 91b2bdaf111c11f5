"""`msa-tiles explain`: which kernel would serve a call, and why the others would not."""

from __future__ import annotations

import argparse
import collections
import inspect
import re
from typing import TYPE_CHECKING

from msa_tiles import console
from msa_tiles.commands._options import add_names, add_variant, known_names
from msa_tiles.names import check, unknown
from msa_tiles.spec.model import DSLS

if TYPE_CHECKING:
    import torch

    from msa_tiles.runtime.dispatch import Candidate
    from msa_tiles.runtime.facts import DeviceFacts
    from msa_tiles.runtime.registry import Cell, Registry

DENSE = "dense_attention"  # has no kernels of its own


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("explain", help="show which kernel serves a call, and why", description=__doc__)
    parser.add_argument("op", metavar="OP", help="operator, for example sparse_attention")
    parser.add_argument(
        "--device",
        help="cuda, cuda:1, or a target such as sm90 (default: the GPU here, else the target with most kernels)",
    )
    parser.add_argument("--precision", default="bf16", help="precision of the call, or its group (default bf16)")
    add_variant(parser, "compile-time dims of the call; the rest are those of the M3 shape")
    add_names(parser, "--feature", "NAME,…", "what the call needs, such as paged")
    parser.add_argument(
        "--queries", type=int, default=0, metavar="N", help="query tokens of the call (default unknown)"
    )
    parser.add_argument("--backend", default="auto", help="auto, tilelang or cutedsl (default auto)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from msa_tiles.runtime.facts import device_facts, target_facts
    from msa_tiles.runtime.parts import PARTS, parts_of
    from msa_tiles.runtime.registry import default_registry

    registry = default_registry()
    if args.op == DENSE:
        console.say(f"{DENSE} runs FlashAttention-4 where it is installed and takes the call, else torch's attention.")
        return 0
    ops = [part for part in parts_of(args.op) if registry.of(part)]
    if not ops:
        whole = (op for op in PARTS if any(map(registry.of, parts_of(op))))
        raise ValueError(unknown("operator", args.op, sorted({*whole, *(cell.op for cell in registry.cells), DENSE})))
    known = known_names(registry)
    check("--precision", [args.precision], known["precision"])
    check("--feature", args.feature, known["feature"])
    check("--backend", [args.backend], ("auto", *DSLS))
    usual = collections.Counter(cell.target for cell in registry.cells).most_common(1)[0][0]
    name = args.device or ("cuda" if torch.cuda.is_available() else usual)
    if name in registry.targets:
        torch_device, device = torch.device("cuda"), target_facts(registry.targets[name])
    else:
        try:
            torch_device = torch.device(name)
            device = device_facts(torch_device, registry.targets.values())
        except (RuntimeError, AssertionError) as error:
            targets = ", ".join(registry.targets)
            why = (
                f"no spec has a target {name}; a tree of your own can have one, see --tree"
                if _is_target(name)
                else str(error)
            )
            raise ValueError(f"--device {name}: {why}; targets: {targets}") from error
    dims = {dim for op in ops for cell in registry.of(op) for dim in cell.variants}
    check(f"--variant of {args.op}:", dict(args.variant), sorted(dims))
    if args.device is None and name != "cuda":
        console.say(f"no CUDA device here: as if on {name}")
    if registry.of(args.op):
        return _explain(args.op, args, registry, torch_device, device)
    console.say(f"{args.op} may launch kernels of {', '.join(ops)}.")
    failures = 0
    for op in ops:
        console.say()
        # What reads nothing of the precision asked for runs in its own.
        asked = args.precision if registry.select(op, precision=args.precision) else registry.of(op)[0].precision
        part = argparse.Namespace(**{**vars(args), "precision": asked})
        failures += bool(_explain(op, part, registry, torch_device, device))
    return 1 if failures else 0


def _is_target(name: str) -> bool:
    return re.fullmatch(r"sm_?\d+[af]?", name) is not None


def _explain(
    op: str, args: argparse.Namespace, registry: Registry, torch_device: torch.device, device: DeviceFacts
) -> int:
    """One operator's kernels; 1 where none serves the call."""
    from msa_tiles.runtime import packs, tuned
    from msa_tiles.runtime.compiler import variant_text
    from msa_tiles.runtime.dispatch import decide
    from msa_tiles.runtime.facts import CallFacts

    cells = registry.of(op)
    own = {dim for cell in cells for dim in cell.variants}
    given = {dim: value for dim, value in args.variant if dim in own}
    features = frozenset(args.feature)
    sharded = "k_offset" in features and _takes_shards(op)
    features -= {"k_offset"} if sharded else set()
    size = tuned.bucket(args.queries) if args.queries else 0
    # A group stands for the first precision in which the operator has kernels.
    model = next(iter(registry.select(op, precision=args.precision)), cells[0])
    precision = args.precision if args.precision in registry.precisions else model.precision
    call = CallFacts(op, torch_device, precision, {**model.ci[0], **given}, features, size=size)
    decision = decide(call, device, registry, args.backend)
    needs = f", needs {', '.join(sorted(call.features))}" if call.features else ""
    console.say(f"{op} on {device}: {call.precision}, {variant_text(call.variant)}{needs}")
    if sharded:
        console.say("  k_offset: the operator hands its kernel the shard as a call of its own")
    for candidate in decision.candidates:
        name = candidate.cell.id + _whence(candidate.cell)
        if candidate.refusal is not None:
            console.say(f"  {name}: refuses: {candidate.refusal}")
            continue
        text = f"serves it as {variant_text(candidate.variant)}, {_origin(candidate, registry)}"
        console.say(f"  {name}: {text}")
        for sentence in packs.mismatches(candidate.cell, candidate.variant):
            console.say(f"    {sentence}")
    if decision.chosen is None:
        console.say("No kernel serves this call. CPU tensors, and backend='reference', run on msa_tiles.reference.")
        return 1
    if decision.figure is not None:
        figure = decision.figure
        fresh = {c.cell.id for c in decision.candidates if figure.fresh(c.cell)}
        timed = ", ".join(
            f"{name} {ms:.4g} ms" + ("" if name in fresh else " (another digest)") for name, ms in figure.ms.items()
        )
        console.say(f"Measured on {figure.card}, {figure.workload}: {timed}")
    console.say(f"Runs {decision.chosen.cell.id}, from {decision.chosen.cell.file}")
    return 0


def _whence(cell: Cell) -> str:
    """Which tree a kernel is of; empty for a shipped one."""
    if cell.tree is None:
        return ""
    return f" (of the tree {cell.tree}{', in place of the one beneath' if cell.replaces else ''})"


def _origin(candidate: Candidate, registry: Registry) -> str:
    """Where the kernel of a call comes from: a pack, the cache, or a compiler."""
    from msa_tiles.runtime.compiler import find_compiled

    if candidate.packed is not None:
        return f"from the pack {candidate.packed.pack.directory}"
    entry = find_compiled(candidate.cell, candidate.variant, registry.targets[candidate.cell.target].arch)
    return "from the cache" if entry else "compiled on first use"


def _takes_shards(op: str) -> bool:
    """Whether the operator takes k_offset; it then rewrites such calls, and no kernel needs to know of it."""
    from msa_tiles import ops

    function = getattr(ops, op, None)
    return function is not None and "k_offset" in inspect.signature(function).parameters
