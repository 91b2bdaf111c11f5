"""Writes `msa_tiles/explaining/measured.json` from the rows of a card: `python perf/expectations.py [--check]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from msa_tiles.bench import rows
from msa_tiles.explaining.expect import MEASURED

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TARGET = ROOT / "perf/results/nvidia-h200.jsonl", "sm90"


def text() -> str:
    """Roofline and measured milliseconds by operator, precision and DSL, the last row of each case."""
    found: dict[str, list[list[float]]] = {}
    cards = set()
    for (op, _, precision, dsl), row in rows.latest(rows.read(RESULTS)).items():
        if row["floor_ms"]:
            found.setdefault(f"{op} {precision} {dsl}", []).append([row["floor_ms"], row["ms"]])
            cards.add(row["card"])
    [card] = cards
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(sorted(pairs))}" for key, pairs in sorted(found.items()))
    return f'{{\n "card": {json.dumps(card)},\n "target": {json.dumps(TARGET)},\n "rows": {{\n{lines}\n }}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when it is not what the rows say")
    if parser.parse_args().check:
        if MEASURED.read_text(encoding="utf-8") == text():
            return 0
        sys.stderr.write(f"{MEASURED} is not what {RESULTS} says: run python perf/expectations.py\n")
        return 1
    MEASURED.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
