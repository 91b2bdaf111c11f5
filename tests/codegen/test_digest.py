from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msa_tiles.codegen import digest_of, toolchain

MakePackage = Callable[[dict[str, str]], Path]
FILES = {
    "dsl/__init__.py": "",
    "dsl/tilelang/__init__.py": "from .mask import visible\n",
    "dsl/tilelang/mask.py": "def visible(): ...\n",
    "dsl/tilelang/softmax.py": "from . import mask\nfrom msa_tiles.dsl.shared import LOG2_E\n",
    "dsl/shared.py": "LOG2_E = 1.44\n",
    "dsl/tilelang/unused.py": "",
    "ops/other.py": "",
}
KERNEL = '# header\n\n"""A kernel."""\n\nimport torch\n\nfrom msa_tiles.dsl.tilelang.softmax import online\n'


@pytest.mark.parametrize(
    "file", ["dsl/tilelang/softmax.py", "dsl/tilelang/mask.py", "dsl/shared.py", "dsl/__init__.py"]
)
def test_helpers_count_however_they_are_imported(file: str, package: MakePackage) -> None:
    before = digest_of(KERNEL, "tilelang", package(FILES))
    assert digest_of(KERNEL, "tilelang", package({file: FILES[file] + "# changed\n"})) != before


@pytest.mark.parametrize("file", ["dsl/tilelang/unused.py", "ops/other.py"])
def test_other_modules_do_not_count(file: str, package: MakePackage) -> None:
    before = digest_of(KERNEL, "tilelang", package(FILES))
    assert digest_of(KERNEL, "tilelang", package({file: "changed = 1\n"})) == before


@pytest.mark.parametrize(
    "line",
    [
        "from msa_tiles.dsl.tilelang import softmax",
        "import msa_tiles.dsl.tilelang.softmax",
        "import msa_tiles.dsl.tilelang.softmax as s",
        "def build():\n    from msa_tiles.dsl.tilelang.softmax import online",
    ],
)
def test_every_way_to_import(line: str, package: MakePackage) -> None:
    kernel = f'"""A kernel."""\n\n{line}\n'
    before = digest_of(kernel, "tilelang", package(FILES))
    assert digest_of(kernel, "tilelang", package({"dsl/shared.py": "LOG2_E = 2\n"})) != before


def test_the_code_counts_and_the_header_does_not(package: MakePackage) -> None:
    root = package(FILES)
    before = digest_of(KERNEL, "tilelang", root)
    assert len(before) == 16
    assert digest_of(KERNEL.replace("# header", "# another\n# header"), "tilelang", root) == before
    assert digest_of(KERNEL.removeprefix("# header\n\n"), "tilelang", root) == before
    assert digest_of(KERNEL + "# why\n", "tilelang", root) != before


def test_the_toolchain_counts(package: MakePackage, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(FILES)
    before = digest_of(KERNEL, "tilelang", root)
    monkeypatch.setitem(toolchain.PINS, "cutedsl", {"nvidia-cutlass-dsl": "9"})
    assert digest_of(KERNEL, "tilelang", root) == before
    monkeypatch.setitem(toolchain.PINS, "tilelang", {"tilelang": "9"})
    assert digest_of(KERNEL, "tilelang", root) != before
