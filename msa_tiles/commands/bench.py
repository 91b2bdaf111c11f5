"""`msa-tiles bench`: time operators against their peers on this GPU, and show the figures as a table and as charts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msa_tiles import console, names
from msa_tiles.commands._options import add_names, cuda_device, listed, only, seconds
from msa_tiles.errors import ToolError
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted
from msa_tiles.spec.model import DSLS

if TYPE_CHECKING:
    from msa_tiles.bench.rows import Row
    from msa_tiles.bench.session import Job

OUT = Path("msa_bench")
NO_PEER = "none"


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time operators against their peers, as a table and charts",
        description="Checks our kernels and every installed peer against the reference, times them one after the other "
        "in both orders, and prints a table. Names are separated by commas.",
    )
    parser.add_argument("ops", nargs="*", default=[], type=listed, metavar="OP", help="operators (default: all)")
    add_names(parser, "--cases", "CASE,…", "only these cases, such as prefill_32k_u (default: all)")
    add_names(parser, "--precision", "NAME,…", "only these precisions or groups of them (default: all)")
    add_names(parser, "--backend", "DSL,…", "only the kernels of these DSLs (default: all)")
    add_names(parser, "--peers", "NAME,…", f"only these peers, or {NO_PEER} (default: all that are installed)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="sustained run of each contender in each order (default 1)"
    )
    parser.add_argument("--device", default="cuda", help="the GPU to use (default cuda)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"JSON lines to append rows to (default {OUT}/<card>.jsonl)"
    )
    parser.add_argument("--charts", type=Path, metavar="DIR", help="draw charts of the rows there, as PNG and SVG")
    parser.add_argument(
        "--from",
        dest="files",
        action="append",
        type=Path,
        metavar="FILE",
        help="time nothing: show the rows of an earlier run; needs no GPU; repeatable",
    )
    parser.add_argument(
        "--agreement",
        action="store_true",
        help="time nothing: print how many blocks quantised queries and keys choose as float32 ones do (default: q8k8)",
    )
    parser.add_argument(
        "--gates", action="store_true", help="compare with the ratios aimed at, and fail when one is not reached"
    )
    parser.set_defaults(func=run)


def _agreement(args: argparse.Namespace) -> int:
    import torch

    from msa_tiles.bench import agreement, precisions

    known = precisions.chosen(args.precision, precisions.INDEXER) if args.precision else precisions.INDEXER[1:2]
    here = torch.cuda.is_available()
    device = cuda_device("--device", args.device, "blocks are chosen there") if here else torch.device("cpu")
    console.say(f"blocks chosen as from float32, {agreement.TOPK} of each query and head, on {device}")
    console.table(agreement.table(device, known=known))
    return 0


def run(args: argparse.Namespace) -> int:
    from msa_tiles.bench import charts, session

    _refuse_forms(args.precision, args.agreement)
    if args.agreement:
        return _agreement(args)
    args.ops = [op for found in args.ops for op in found]
    jobs = session.plan(args.ops, args.cases, args.precision)
    names.check("--backend", args.backend, DSLS)
    names.check("--peers", args.peers, (*session.PEERS, NO_PEER))
    if NO_PEER in args.peers:
        args.peers = [only("--peers", args.peers, f"{NO_PEER} stands alone")]
    seconds("--seconds", args.seconds)
    if args.files and args.out is not None:
        raise ValueError("--out: --from times nothing, so that there are no rows to write; leave one of them out")
    if args.charts is not None and not charts.available():
        raise ToolError("--charts needs matplotlib: pip install 'msa-tiles[demo]'")
    if args.charts is not None:
        refuse_unwritable("--charts", args.charts, directory=True)
    if args.files:
        results = _recorded(args.files, jobs, args)
        failures: list[str] = []
        if not results:
            asked = any((args.ops, args.cases, args.precision, args.backend))
            what = "no row is of what was asked for" if asked else "there are no rows"
            raise ValueError(f"--from: {what} in {', '.join(map(str, args.files))}")
    else:
        timed = _timed(jobs, args)
        if timed is None:
            return 2
        results, failures = timed
    met = _show(results, args)
    for failure in failures:
        console.complain(failure)
    return 1 if failures or not met else 0


def _refuse_forms(precisions: Sequence[str], agreement: bool) -> None:
    """Raise ValueError for a form of kernels: what is timed, or chooses blocks, are calls; none names a form."""
    from msa_tiles.runtime.pairs import called_as, form_text, forms_in
    from msa_tiles.runtime.registry import default_registry

    registry = default_registry()
    for name in precisions:
        for form, called in forms_in(name, registry).items():
            if agreement:
                raise ValueError(
                    f"--precision {name}: {form_text(form, called)}; it stores what {called} stores, and "
                    f"--agreement --precision {called} counts the blocks that are chosen from that"
                )
            ops = ",".join(dict.fromkeys(cell.op for cell in registry.select(precision=form)))
            raise ValueError(
                f"--precision {name}: {form_text(form, called)}; --precision {called_as(name, registry)} times what "
                f"calls run, and `msa-tiles tune --op {ops} --precision {form}` times the forms side by side"
            )


def _recorded(files: Sequence[Path], jobs: Sequence[Job], args: argparse.Namespace) -> list[Row]:
    """The rows of the files, with the figures of peers; only those asked for, where something was asked for."""
    from msa_tiles.bench import cases, precisions, rows

    found: list[Row] = sorted((row for file in files for row in rows.read(file)), key=lambda row: str(row["date"]))
    timed = dict.fromkeys(half for row in found for half in precisions.halves(row["precision"]))
    names.check("--from: the precision of rows,", timed, cases.specs().precisions)
    if args.ops or args.cases or args.precision:
        wanted = {(job.benchmark.op, job.label, job.precision) for job in jobs}
        found = [row for row in found if (row["op"], row["case"], row["precision"]) in wanted]
    if args.peers:
        found = [
            {**row, "baselines": {peer: ms for peer, ms in row["baselines"].items() if peer in args.peers}}
            for row in found
        ]
    return [row for row in found if not args.backend or row["dsl"] in args.backend]


def _timed(jobs: Sequence[Job], args: argparse.Namespace) -> tuple[list[Row], list[str]] | None:
    """The rows of a run on the GPU present, written to a file as they come, and what failed; None for a bad call."""
    import torch

    from msa_tiles.bench import rows, session
    from msa_tiles.runtime import toolchain
    from msa_tiles.runtime.facts import device_facts
    from msa_tiles.runtime.registry import default_registry

    if args.out is not None:
        refuse_unwritable("--out", args.out, directory=False)
    device = cuda_device("--device", args.device, "kernels are timed on one; --from FILE shows rows of earlier runs")
    dsls = tuple(dsl for dsl in DSLS if not args.backend or dsl in args.backend)
    for dsl, reason in ((dsl, toolchain.missing(dsl)) for dsl in dsls):
        if reason is not None:
            console.complain(f"{dsl} is left out: {reason}")
    dsls = tuple(dsl for dsl in dsls if toolchain.missing(dsl) is None)
    if not dsls:
        return None
    registry = default_registry()
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    facts = device_facts(device, registry.targets.values())
    path = OUT / rows.file_name(facts.name) if args.out is None else args.out
    peers = tuple(peer for peer in args.peers if peer != NO_PEER) if args.peers else None
    refuse_unwritable("--out", path, directory=False)
    settings = session.Settings(dsls, peers, args.seconds)
    console.note(f"{counted(len(jobs), 'case')} on {facts}; rows go to {path}")
    results: list[Row] = []
    failures: list[str] = []
    outcomes = session.run(jobs, settings, device, facts, registry, console.note)
    try:
        for done in console.arrivals(outcomes, map(str, jobs), "cases", lambda done: str(done.job)):
            for row in done.rows:
                rows.append(path, row)
            results += done.rows
            failures += done.failures
    except session.DeviceLost as error:
        failures.append(str(error))
    return results, failures


def _show(results: Sequence[Row], args: argparse.Namespace) -> bool:
    """Print a table of each card, draw what is asked for; whether the gates are met, if that is asked for."""
    from msa_tiles.bench import charts, gates, rows, table

    current = rows.digests()
    of_card: dict[str, list[Row]] = {}
    for row in results:
        of_card.setdefault(row["card"], []).append(row)
    tables = {card: table.lines(own, current) for card, own in of_card.items()}
    for card, lines in tables.items():
        console.say(f"{card}, {_days(rows.latest(of_card[card]).values())}")
        console.table(lines)
        console.say("")
    if tables:
        console.say(table.legend([line for lines in tables.values() for line in lines]))
    if args.charts is not None and results:
        drawn = charts.draw(list(results), args.charts)
        for path in drawn:
            console.say(f"wrote {path}")
        if not drawn:
            console.complain(
                "no chart: it takes prefill, msa_decode or server_* rows of several lengths, or rows with a roofline"
            )
    if not args.gates:
        return True
    latest = {card: rows.latest(own) for card, own in of_card.items()} or {"": {}}
    for card, own in latest.items():
        if len(latest) > 1:
            console.say(card)
        console.table(gates.report(own, current))
    for what, why in gates.LATER.items():
        console.say(f"left out: {what} ({why})")
    return all(gates.all_met(own, current) for own in latest.values())


def _days(results: Iterable[Row]) -> str:
    """The first and the last day of rows."""
    dates = {row["date"] for row in results}
    return min(dates) if len(dates) == 1 else f"{min(dates)} to {max(dates)}"
