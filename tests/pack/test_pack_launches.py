"""A packed kernel asks the driver for exactly what it asks for with the runtime of its own DSL.

Each DSL's kernels, one of every operator, are launched in two processes on a driver that runs nothing and writes
everything: device code, attributes, tensor maps, grids, blocks, shared memory, attributes of the launch and every byte
of every parameter. Equal means that the runtime of packs does what the DSL's does.
"""

from __future__ import annotations

import json
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
    assert {point["op"] for point in points} == {cell.op for cell in registry.select(dsl=dsl, target="sm90")}
    (tmp_path / "points.json").write_text(json.dumps(points))
    jobs = jobs_of(str(tmp_path / "points.json"), registry, "sm90", dsl)
    assert len(jobs) == len(points)
    assert len(list(make(jobs, registry.targets["sm90"], tmp_path / "pack", workers=2))) == len(jobs)
    _, wanted = launches("dsl", dsl, "all", str(runtime_of(dsl, tmp_path)))
    cache, before = tmp_path / "no_cache", sorted((tmp_path / "pack").iterdir())
    surroundings = {"MSA_TILES_PACKS": str(tmp_path / "pack"), "MSA_TILES_CACHE_DIR": str(cache), "PATH": ""}
    report, found = launches("pack", dsl, "all", **surroundings)
    assert report == {"libraries": [], "compiled": 0, "kernels": len(jobs)}
    assert launches("beside", dsl, "all", str(runtime_of(dsl, tmp_path)), **surroundings)[1] == found
    # Each launch was made twice, and kernels that are launched once more than once.
    assert sum(line.startswith("launch") for line in wanted) >= 2 * len(jobs)
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
        assert launches("pack", dsl, "all", FAKE_CUDA_FAIL=call, **surroundings)[0] == sentence
    assert not cache.exists()
    assert sorted((tmp_path / "pack").iterdir()) == before
