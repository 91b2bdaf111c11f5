"""Copies of vLLM's and SGLang's wheels the few files that tests load, for a machine without a registry.

    python tests/compat/carry.py OUT vllm-0.33.0-….whl sglang-0.5.23-….whl

There, MSA_TILES_VLLM_FILES and MSA_TILES_SGLANG_FILES name OUT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compat import sglang_files, vllm_layer
from compat.stand_ins import Source

from msa_tiles.compat.sglang import forwards

WANTED = {
    "vllm": vllm_layer.REAL,
    "sglang": (*sglang_files.REAL, forwards.BACKEND, sglang_files.KERNELS, f"{sglang_files.KERNELS}."),
}


def carry(source: Source, modules: Iterable[str], out: Path) -> int:
    """Copy modules, and what lies beneath names that end in a dot; how many files that were."""
    wanted = tuple(modules)
    count = 0
    for name in source.names():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if any(module == one or (one.endswith(".") and module.startswith(one)) for one in wanted):
            text, _ = source.read(module)
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
            count += 1
    return count


def main(out: str, *wheels: str) -> None:
    for wheel in map(Path, wheels):
        package = wheel.name.partition("-")[0]
        if package not in WANTED:
            raise SystemExit(f"{wheel}: wanted a wheel of {' or '.join(WANTED)}")
        sys.stdout.write(f"{carry(Source(wheel), WANTED[package], Path(out))} files of {package} in {out}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
