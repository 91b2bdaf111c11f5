"""`msa-tiles verify`: run kernels on the GPU present and compare them with the reference over the whole grid."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msa_tiles import console
from msa_tiles.commands._options import add_filters, filters_of, without_missing
from msa_tiles.commands.support import is_generated

if TYPE_CHECKING:
    from msa_tiles.runtime.registry import Cell, Registry


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "verify", help="run kernels on this GPU against the reference, resumably", description=__doc__
    )
    add_filters(parser)
    parser.add_argument("--stale", action="store_true", help="only cells whose digest has changed since they passed")
    parser.add_argument("--device", default="cuda", help="the GPU to use (default cuda)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compile in N processes (default: all cores)"
    )
    parser.add_argument("--seed", type=int, help="repeat the inputs of an earlier run (default: fresh ones)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from msa_tiles import paths
    from msa_tiles.runtime import evidence
    from msa_tiles.runtime.build import build, ci_jobs
    from msa_tiles.runtime.facts import device_facts
    from msa_tiles.runtime.registry import default_registry
    from msa_tiles.spec import load
    from msa_tiles.verify import runner
    from msa_tiles.verify.cases import cases

    registry = default_registry()
    if not torch.cuda.is_available():
        console.complain("msa-tiles verify: there is no CUDA device here; kernels can only be verified on one")
        return 2
    device = torch.device(args.device)
    facts = device_facts(device, registry.targets.values())
    verified = evidence.read_verified(registry.directory)
    chosen = [
        cell
        for cell in registry.select(**filters_of(args))
        if cell.target == facts.target and not (args.stale and evidence.is_verified(cell, verified))
    ]
    wanted = len(chosen)
    chosen = without_missing(chosen)
    if wanted and not chosen:
        return 2
    if drifted := [cell.id for cell in chosen if not is_generated(cell)]:
        # Otherwise the evidence of one kernel would stand under the digest of another.
        console.complain(f"msa-tiles verify: edited since `msa-tiles generate` ran: {', '.join(drifted)}")
        return 2
    specs = load(paths.specs_dir())
    grid = [(cell, cases(cell, specs)) for cell in chosen]
    console.say(f"{len(chosen)} cells to verify on {facts}")
    # Compiled side by side first: the GPU would wait for each kernel otherwise.
    jobs = ci_jobs(_launched(chosen, registry))
    outcomes = build(jobs, registry.targets, workers=args.jobs, audited=False)
    counter: Iterator[int] = console.progress(len(jobs), "compiling")
    for outcome, _ in zip(outcomes, counter, strict=True):
        if not outcome.good:
            console.complain(f"{outcome.job}: {outcome.complaints[0]}")
    numbers = random.Random(args.seed)
    results = runner.run(grid, device, registry.directory, seed=lambda: numbers.randrange(1 << 31))
    failures = 0
    for result in console.progress(results, "cases"):
        if result.failure is not None:
            failures += 1
            console.complain(f"{result.case.cell.id} {result.case.key} (seed {result.seed}): {result.failure}")
    verified = evidence.read_verified(registry.directory)
    rows = [("cell", "worst error", "cases", "result")]
    for cell in chosen:
        entry = verified.get(cell.id, {})
        good = evidence.is_verified(cell, verified)
        rows.append(
            (
                cell.id,
                f"{entry['worst_error']:.3g}" if good else "",
                str(entry.get("cases", "")),
                "verified" if good else "failed",
            )
        )
    console.table(rows)
    return 1 if failures else 0


def _launched(chosen: Iterable[Cell], registry: Registry) -> list[Cell]:
    """The cells that may run: helpers of other operators too, of another DSL where the chosen ones lack them."""
    wanted = {(cell.target, cell.dsl) for cell in chosen}
    served = {(cell.op, cell.target, cell.precision) for cell in registry.cells if (cell.target, cell.dsl) in wanted}
    targets = {target for target, _ in wanted}
    return [
        cell
        for cell in registry.cells
        if cell.target in targets
        and ((cell.target, cell.dsl) in wanted or (cell.op, cell.target, cell.precision) not in served)
    ]
