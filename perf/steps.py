"""Runs what a GPU is needed for, in the time that there is.

    python perf/steps.py --out DIR [--seconds N] [--lanes N] [--from STEP] [--only STEP …] [--list]

A GPU that is rented by the minute ends when its time does. Each step has a limit of its own, or what is left where that
is less. A step that reaches it is interrupted, so that pytest and `msa-tiles` still say how far they came, and the next
one begins; none is begun with less than a quarter of its limit left.

Suites wait for compilers more than for the GPU: N lanes run so many steps side by side, and most suites have workers of
their own. Steps that take times, or nearly all memory, run behind them, one after the other.

DIR gets a step's output in `<step>.log`, the rows of its tests in `<step>.xml`, what was verified in `verified.json`,
and a step's status, seconds and last line in `steps.json`, written after every step. A second run into the same DIR
leaves out what has passed. From packs (`MSA_TILES_PACKS`; `pytest --rehearse` lists the kernels) nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GRACE = 20  # seconds from an interrupt to the end
TILES = (sys.executable, "-m", "msa_tiles")


class Step(NamedTuple):
    name: str
    seconds: int
    command: tuple[str, ...]
    alone: bool = False  # takes times, or nearly all memory: nothing runs beside it


def tests(name: str, seconds: int, workers: int = 4, alone: bool = False) -> Step:
    """A file of tests/gpu, whose tests so many workers share."""
    shared = ("-n", str(workers), "--dist", "load") if workers > 1 else ("-n", "0")
    return Step(name, seconds, (sys.executable, "-m", "pytest", "-q", *shared, f"tests/gpu/test_gpu_{name}.py"), alone)


def bench(name: str, seconds: int, *options: str) -> Step:
    return Step(f"bench_{name}", seconds, (*TILES, "bench", *options), alone=True)


def sanitizer(tool: str) -> Step:
    return Step(f"sanitizer_{tool}", 400, (*TILES, "verify", "--smallest", "--sanitizer", tool))


# What lacks evidence first, then what had it before the last changes.
STEPS = (
    Step("verify", 240, (*TILES, "verify", "--stale", "--processes", "6")),
    sanitizer("memcheck"),
    sanitizer("synccheck"),
    tests("promises", 240),
    tests("shards", 180),
    tests("decode", 180),
    tests("e4m3", 300),
    tests("copied", 240),
    tests("batch_invariant", 120),
    tests("four_bits", 300, workers=6),
    tests("hidden", 240),
    tests("caches", 120),
    tests("vllm", 300),
    tests("sglang", 300),
    tests("compat", 120),
    tests("transformers", 180),
    tests("dense", 120),
    tests("quant", 60),
    tests("trees", 120),
    tests("packs", 300, workers=2),
    tests("bench", 300, workers=3),
    tests("four_bits_long", 360, workers=1),
    # As far as they come: `verify` runs the same cases, and three times each.
    tests("cells", 240, workers=6),
    tests("repeats", 240, workers=3),
    tests("long", 240, workers=1, alone=True),
    tests("large", 180, workers=1, alone=True),
    tests("production", 180, workers=1, alone=True),
    bench("prefill", 240, "sparse_attention", "--precision", "q16kv8,q16kv4,q16kvmx4"),
    bench("insert", 120, "norm_rope_append"),
    bench("decode", 180, "msa_decode", "decode_score", "sparse_decode"),
    Step("tune", 240, (*TILES, "tune"), alone=True),
)


def run(step: Step, seconds: float, out: Path) -> dict[str, object]:
    """One step, interrupted after so many seconds: its status, or `late`; its seconds and last line."""
    command = [*step.command]
    if "pytest" in command:
        command += [f"--junit-xml={out / step.name}.xml"]
    log = out / f"{step.name}.log"
    began, late = time.monotonic(), False
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    status = "late" if late else process.returncode
    return {"status": status, "seconds": round(time.monotonic() - began), "last": lines[-1] if lines else ""}


class Record:
    """What became of steps, in DIR, and until when they may run."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.end, self._lock = out, time.monotonic() + seconds, threading.Lock()
        self._told = out / "steps.json"
        self.found: dict[str, dict[str, object]] = json.loads(self._told.read_text()) if self._told.exists() else {}

    def take(self, step: Step) -> None:
        """Run a step, unless it has passed or there is too little time left."""
        left = self.end - time.monotonic() - GRACE
        if self.found.get(step.name, {}).get("status") == 0 or left < step.seconds / 4:
            return
        sys.stderr.write(f"{step.name}: up to {min(step.seconds, left):.0f} s\n")
        became = run(step, min(step.seconds, left), self.out)
        with self._lock:
            self.found[step.name] = became
            self._told.write_text(json.dumps(self.found, indent=1) + "\n")
            shutil.copy(ROOT / "generated/verified.json", self.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--out", type=Path, metavar="DIR", help="where logs and evidence go")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="steps that run side by side (default 1)")
    parser.add_argument(
        "--from", dest="first", choices=names, default=names[0], metavar="STEP", help="leave out earlier"
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help="leave out others")
    parser.add_argument("--list", action="store_true", help="say what the steps are, and end")
    given = parser.parse_args()
    if given.list:
        sys.stdout.writelines(f"{step.name:22}{step.seconds:5} s  {' '.join(step.command[1:])}\n" for step in STEPS)
        return 0
    if given.out is None:
        parser.error("--out DIR is needed")
    if given.lanes < 1:
        parser.error(f"--lanes is {given.lanes}, wanted at least 1")
    # What a shell runs in the background ignores interrupts, and so would the steps.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.out.mkdir(parents=True, exist_ok=True)
    record = Record(given.out, given.seconds)
    steps = [step for step in STEPS[names.index(given.first) :] if step.name in given.only]
    with ThreadPoolExecutor(given.lanes) as lanes:
        list(lanes.map(record.take, [step for step in steps if not step.alone]))
    for step in steps:
        if step.alone:
            record.take(step)
    for name in names:
        if name in record.found:
            each = record.found[name]
            sys.stdout.write(f"{name:22}{each['status']!s:>5}{each['seconds']:>5} s  {each['last']}\n")
    return 0 if all(each["status"] == 0 for each in record.found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
