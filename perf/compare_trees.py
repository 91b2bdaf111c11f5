"""Times the kernels of two checkouts against each other, alternately, on the card at hand.

    python perf/compare_trees.py OLD [NEW] [--op OP …] [--case CASE …] [--recorded FILE] [--dsl DSL …] [--out FILE]

OLD and NEW (default: this checkout) are checkouts of the project. Each runs in a process of its own, with its own
kernels and launches, on inputs of the same seeds; the processes take turns, so that only one of them is on the card at
a time. A line a case: median milliseconds of either, NEW over OLD as the median of the rounds' ratios, and where the
middle half of these lies. Cases over `--limit` (1.02) are timed a second time, over twice the rounds, and count as
slower only when that repeats it; the exit status is 1 then. `--recorded FILE` leaves out cases without a row in a file
of `msa-tiles bench`. With `--packs DIR` the process of NEW runs from packs: OLD and NEW may be one checkout then, and
packed kernels are timed against those that are compiled here.

An H200 under load was seen to slow down for 0.3 of every 1.1 s. A tree's turn is therefore short beside
that, whatever a call takes, and which tree begins a round is drawn: turns of 0.3 s in a fixed order met it again and
again with the same tree.

Both trees must have `msa_tiles.bench`; a case that one of them lacks is left out and named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

FEWEST = 3  # plays of a turn
ORDER = random.Random(0)  # in which trees begin their rounds

HERE = Path(__file__).resolve().parent.parent


def work(requests: IO[str], answers: IO[str]) -> None:
    """The process of one tree: answers a line of JSON for every line of JSON."""
    import torch

    from msa_tiles.bench import harness
    from msa_tiles.bench.operators import BENCHMARKS
    from msa_tiles.bench.timing import CudaClock, sets_needed

    device = torch.device("cuda")
    clock = CudaClock()
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    play: Any = None
    calls: list[Any] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal play, calls
        if "prepare" in request:
            play, calls = None, []
            harness.release()
            op, label, precision, dsl = request["prepare"]
            benchmark = BENCHMARKS.get(op)
            if benchmark is None or label not in benchmark.labels:
                return {"skipped": f"no case {op} {label}"}
            torch.manual_seed(0)
            bench = benchmark.prepare(benchmark.find(label), device, precision)
            sets = [bench.make(seed) for seed in range(sets_needed(bench.bytes_per_set, l2_bytes))]
            calls = [bench.ours(dsl, inputs) for inputs in sets]
            play, how = clock.load(calls)
            clock.run(play, 2)
            return {"how": how}
        # The first play behind the other tree's finds cold caches and is not counted.
        estimate = clock.run(play, 2)[0][1]
        times = max(FEWEST, math.ceil(request["seconds"] * 1e3 / max(estimate, 1e-3)))
        return {"ms": clock.run(play, times)[1] / times / len(calls)}

    for line in requests:
        try:
            found = answer(json.loads(line))
        except Exception as error:  # the other tree's turn goes on, and the case says why it was left out
            found = {"skipped": harness.first_line(error)}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


class Tree:
    """A checkout and its process."""

    def __init__(self, path: Path, packs: Path | None = None) -> None:
        self.path = path
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
        if packs:
            environment["MSA_TILES_PACKS"] = str(packs.resolve())
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=path,
            env=environment,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.path} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def compare(old: Tree, new: Tree, case: tuple[str, str, str, str], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of both trees over rounds of one turn each, and of the rounds' ratios, or why there are none."""
    for tree in (old, new):
        if skipped := tree.ask(prepare=case).get("skipped"):
            return {"case": case, "skipped": f"{tree.path.name}: {skipped}"}
    times: dict[Tree, list[float]] = {old: [], new: []}
    begins = [old, new] * ((rounds + 1) // 2)
    ORDER.shuffle(begins)
    for first in begins[:rounds]:
        for tree in (old, new) if first is old else (new, old):
            found = tree.ask(seconds=seconds)
            if "skipped" in found:
                return {"case": case, "skipped": f"{tree.path.name}: {found['skipped']}"}
            times[tree].append(found["ms"])
    ratios = [after / before for before, after in zip(*times.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return {
        "case": case,
        "old_ms": statistics.median(times[old]),
        "new_ms": statistics.median(times[new]),
        "ratio": middle,
        "half": [low, high],
        "rounds": list(times.values()),
    }


def known_cases(
    ops: list[str], labels: list[str], dsls: list[str], precision: str, recorded: Path | None = None
) -> list[tuple[str, str, str, str]]:
    from msa_tiles.bench.operators import BENCHMARKS

    cases = [
        (op, label, precision, dsl)
        for op, benchmark in BENCHMARKS.items()
        if not ops or op in ops
        for label in benchmark.labels
        if not labels or label in labels
        for dsl in dsls
    ]
    if recorded is None:
        return cases
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    named = {(row["op"], row["case"], row["precision"]) for row in rows}
    return [case for case in cases if case[:3] in named]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=HERE)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--recorded", type=Path, help="only cases with a row in this file")
    parser.add_argument("--packs", type=Path, help="directory of packs that NEW runs from")
    parser.add_argument("--dsl", action="append", choices=("tilelang", "cutedsl"))
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=16, help="at least 2")
    parser.add_argument("--seconds", type=float, default=0.05, help=f"of a tree's turn, at least {FEWEST} plays")
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--out", type=Path, help="a JSON line a case")
    options = parser.parse_args()
    trees = Tree(options.old.resolve()), Tree(options.new.resolve(), options.packs)
    dsls = options.dsl or ["cutedsl", "tilelang"]
    cases = known_cases(options.op, options.case, dsls, options.precision, options.recorded)
    slower = 0
    for number, case in enumerate(cases, start=1):
        found = compare(*trees, case, options.rounds, options.seconds)
        if found.get("ratio", 0) > options.limit:
            again = compare(*trees, case, 2 * options.rounds, options.seconds)
            found["again"] = again.get("ratio")
            slower += again.get("ratio", 0) > options.limit
        text = f"[{number}/{len(cases)}] {' '.join(case):<60}"
        if "skipped" in found:
            text += f" skipped: {found['skipped']}"
        else:
            text += f" {found['old_ms']:9.4f} -> {found['new_ms']:9.4f} ms  {found['ratio']:.3f}"
            text += " ({:.3f} to {:.3f})".format(*found["half"])
            text += f", again {found['again']:.3f}" if found.get("again") else ""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    sys.stdout.write(f"{slower} of {len(cases)} cases are slower by more than {options.limit - 1:.0%}, twice\n")
    return 1 if slower else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        sys.stdout, answers = sys.stderr, sys.stdout  # what a library prints is no answer
        work(sys.stdin, answers)
    else:
        sys.exit(main())
