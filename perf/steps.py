"""Runs what a GPU is needed for, one step after the other, in the time that there is.

    python perf/steps.py --out DIR [--seconds N] [--from STEP] [--only STEP …] [--list]

A GPU that is rented by the minute ends when its time does. Each step has a limit of its own, or what is left where that
is less. A step that reaches it is interrupted, so that pytest and `msa-tiles` still say how far they came, and the next
one begins; none is begun with less than a quarter of its limit left.

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
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GRACE = 20  # seconds from an interrupt to the end
TILES = (sys.executable, "-m", "msa_tiles")


class Step(NamedTuple):
    name: str
    seconds: int
    command: tuple[str, ...]


def tests(name: str, seconds: int, *options: str) -> Step:
    """A file of tests/gpu."""
    return Step(name, seconds, (sys.executable, "-m", "pytest", "-q", f"tests/gpu/test_gpu_{name}.py", *options))


def bench(name: str, seconds: int, *options: str) -> Step:
    return Step(f"bench_{name}", seconds, (*TILES, "bench", *options))


SMALLEST = (*TILES, "verify", "--smallest", "--dsl", "tilelang", "--precision", "nvfp4,fp4", "--sanitizer")
# What lacks evidence first, then what had it before the last changes.
STEPS = (
    Step("verify", 240, (*TILES, "verify", "--stale", "--processes", "6")),
    tests("production", 120),
    tests("copied", 120),
    tests("four_bits", 240),
    tests("caches", 90),
    tests("long", 120),
    tests("four_bits_long", 90),
    *(Step(f"sanitizer_{tool}", 180, (*SMALLEST, tool)) for tool in ("memcheck", "synccheck")),
    bench("prefill", 240, "sparse_attention", "--precision", "q16kv8,q16kv4,q16kvmx4"),
    bench("insert", 90, "norm_rope_append"),
    tests("vllm", 120),
    tests("sglang", 60),
    tests("compat", 60),
    tests("transformers", 60),
    bench("decode", 180, "msa_decode", "decode_score", "sparse_decode"),
    tests("e4m3", 120),
    tests("hidden", 120),
    tests("dense", 60),
    tests("batch_invariant", 60),
    tests("decode", 90),
    tests("promises", 120),
    tests("shards", 90),
    tests("repeats", 120),
    tests("quant", 30),
    tests("trees", 60),
    tests("packs", 60),
    tests("bench", 60),
    tests("cells", 60),
    tests("large", 120),
    Step("tune", 240, (*TILES, "tune")),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--out", type=Path, metavar="DIR", help="where logs and evidence go")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
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
    # What a shell runs in the background ignores interrupts, and so would the steps.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.out.mkdir(parents=True, exist_ok=True)
    told = given.out / "steps.json"
    found: dict[str, dict[str, object]] = json.loads(told.read_text()) if told.exists() else {}
    end = time.monotonic() + given.seconds
    for step in STEPS[names.index(given.first) :]:
        left = end - time.monotonic() - GRACE
        if step.name not in given.only or found.get(step.name, {}).get("status") == 0 or left < step.seconds / 4:
            continue
        sys.stderr.write(f"{step.name}: up to {min(step.seconds, left):.0f} s\n")
        found[step.name] = run(step, min(step.seconds, left), given.out)
        told.write_text(json.dumps(found, indent=1) + "\n")
        shutil.copy(ROOT / "generated/verified.json", given.out)
    for name in names:
        if name in found:
            each = found[name]
            sys.stdout.write(f"{name:22}{each['status']!s:>5}{each['seconds']:>5} s  {each['last']}\n")
    return 0 if all(each["status"] == 0 for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
