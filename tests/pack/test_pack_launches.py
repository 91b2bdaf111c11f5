"""A packed kernel asks the driver for exactly what it asks for with the runtime of its own DSL.

Kernels of each DSL, of operators that ask the driver for different things and of others that are drawn anew in every
run, are launched in two processes on a driver that runs nothing and writes everything: device code, attributes, tensor
maps, grids, blocks, shared memory, attributes of the launch and every byte of every parameter. Equal means that the
runtime of packs does what the DSL's does.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from libraries import compile_library

from msa_tiles.pack.elf import Library
from msa_tiles.pack.make import make
from msa_tiles.pack.points import jobs_of
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry
from msa_tiles.runtime.toolchain import ToolchainError

pytestmark = pytest.mark.slow

# Between them: tensor maps of keys and of tiles, launches that wait for the kernel before, and launches without either.
EVERY_RUN = {"sparse_attention", "sparse_decode", "topk_select"}
DRAWN = 7  # of the other operators


def runtime_of(dsl: str, directory: Path) -> Path:
    """What `launches.py dsl` loads for CuTe DSL: its archive for linking as a shared library."""
    if dsl == "tilelang":
        return directory
    archive = toolchain.cutedsl_runtime().parent / "libcuda_dialect_runtime_static.a"
    if not archive.exists():
        pytest.skip(f"{archive} is not there to compare with")
    library = directory / "libcutert.so"
    compile_library(library, "-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive")
    return library


@pytest.mark.parametrize("dsl", ["cutedsl", "tilelang"])
def test_a_pack_launches_what_the_dsl_launches(dsl: str, launches: Callable, tmp_path: Path) -> None:
    try:
        toolchain.require_compiler(dsl)
    except ToolchainError as error:
        pytest.skip(str(error))
    registry = default_registry()
    points, _ = launches("points", dsl, "all")
    operators = {cell.op for cell in registry.select(dsl=dsl, target="sm90")}
    assert {point["op"] for point in points} == operators
    drawn = random.Random(f"{os.environ['MSA_TILES_SEED']} {dsl}").sample(sorted(operators - EVERY_RUN), DRAWN)
    names = ",".join(sorted({*EVERY_RUN, *drawn}))
    points = [point for point in points if point["op"] in names.split(",")]
    (tmp_path / "points.json").write_text(json.dumps(points))
    jobs = jobs_of(str(tmp_path / "points.json"), registry, "sm90", dsl)
    assert len(jobs) == len(points)
    assert len(list(make(jobs, registry.targets["sm90"], tmp_path / "pack", workers=2))) == len(jobs)
    _, wanted = launches("dsl", dsl, names, str(runtime_of(dsl, tmp_path)))
    cache, before = tmp_path / "no_cache", sorted((tmp_path / "pack").iterdir())
    surroundings = {"MSA_TILES_PACKS": str(tmp_path / "pack"), "MSA_TILES_CACHE_DIR": str(cache), "PATH": ""}
    report, found = launches("pack", dsl, names, **surroundings)
    assert report == {"libraries": [], "compiled": 0, "kernels": len(jobs)}
    assert launches("beside", dsl, names, str(runtime_of(dsl, tmp_path)), **surroundings)[1] == found
    # Each launch was made twice, and kernels that are launched once more than once.
    launched = [line for line in wanted if line.startswith("launch")]
    assert len(launched) >= 2 * len(jobs)
    if dsl == "tilelang":  # CuTe DSL makes its tensor maps itself, and gives attributes to every launch
        assert any(line.startswith("tensor map") for line in wanted)
        assert any(" attribute " not in line for line in launched)
    assert any(" attribute " in line for line in launched)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == theirs
    for path in before:
        if path.suffix == ".so":
            library = Library.read(path)
            assert library.needed() <= {"libc.so.6"}
            assert all(name.startswith(("TVMFFI", "MT1")) for name in library.asked()), path
    errors = {
        "load": "RuntimeError: the kernel cannot be loaded: CUDA_ERROR_FAKE a made-up error",
        "launch": "RuntimeError: the launch failed: CUDA_ERROR_FAKE a made-up error",
    }
    for call, sentence in errors.items():
        assert launches("pack", dsl, names, FAKE_CUDA_FAIL=call, **surroundings)[0] == sentence
    assert not cache.exists()
    assert sorted((tmp_path / "pack").iterdir()) == before
