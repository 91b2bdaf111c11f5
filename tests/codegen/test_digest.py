from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msa_tiles.codegen import digest_of as digest_for
from msa_tiles.codegen import toolchain
from msa_tiles.sources import syntax_of, unchanging

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
ARCH = "sm_90a"
KERNEL = '# header\n\n"""A kernel."""\n\nimport torch\n\nfrom msa_tiles.dsl.tilelang.softmax import online\n'


def digest_of(text: str, dsl: str, package: Path) -> str:
    return digest_for(text, dsl, ARCH, package)


@pytest.mark.parametrize(
    "file", ["dsl/tilelang/softmax.py", "dsl/tilelang/mask.py", "dsl/shared.py", "dsl/__init__.py"]
)
def test_helpers_count_however_they_are_imported(file: str, package: MakePackage) -> None:
    before = digest_of(KERNEL, "tilelang", package(FILES))
    assert digest_of(KERNEL, "tilelang", package({file: FILES[file] + "changed = 1\n"})) != before


def test_helpers_are_read_once_where_they_stay(package: MakePackage) -> None:
    """Of many kernels side by side; who asks later gets what is there by then, as inside another block of that kind."""
    root, changed = package(FILES), {"dsl/shared.py": "LOG2_E = 2\n"}
    before = digest_of(KERNEL, "tilelang", root)
    with unchanging():
        assert digest_of(KERNEL, "tilelang", root) == before
        package(changed)
        with unchanging():
            assert digest_of(KERNEL, "tilelang", root) == before
    after = digest_of(KERNEL, "tilelang", root)
    assert after != before
    with unchanging():
        assert digest_of(KERNEL, "tilelang", root) == after


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
    assert digest_of(KERNEL + "why = 1\n", "tilelang", root) != before


WORDS = '''"""A kernel."""

from msa_tiles.dsl.tilelang.softmax import online


class Kernel:
    """Says what it does."""

    rows = 8
    """of a tile"""

    def run(self, text="kept", *, scale=1.0):
        """Runs."""
        # why
        return f"{text:>{self.rows}}" if scale else {**{}}
'''
BARE = """from msa_tiles.dsl.tilelang.softmax import online
class Kernel:
    rows = (8)
    def run(
        self, text='kept', *, scale=1.0,
    ): return f'{text:>{self.rows}}' if scale else {**{}}
"""


def test_words_and_layout_do_not_count(package: MakePackage) -> None:
    root = package(FILES)
    before = digest_of(WORDS, "tilelang", root)
    assert digest_of(BARE, "tilelang", root) == before
    package({"dsl/shared.py": '"""Mended."""\n# why\nLOG2_E = 1.44\n'})
    assert digest_of(WORDS, "tilelang", root) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("rows = 8", "rows = 9"), ('"kept"', '"other"'), ("1.0", "1"), ("def run", "def go"), ("{**{}}", "{}")],
)
def test_every_part_of_the_code_counts(old: str, new: str, package: MakePackage) -> None:
    root = package(FILES)
    assert digest_of(WORDS.replace(old, new), "tilelang", root) != digest_of(WORDS, "tilelang", root)


def test_the_syntax_reads_the_same_in_every_python() -> None:
    """Written down, because later versions of Python give old nodes new fields."""
    assert syntax_of("def f(a: int = None):\n    'doc'\n    return -a\n") == (
        "Module(body=[FunctionDef(name='f', args=arguments(args=[arg(arg='a', annotation=Name(id='int', ctx=Load()))], "
        "defaults=[NoneType None]), body=[Return(value=UnaryOp(op=USub(), operand=Name(id='a', ctx=Load())))])])"
    )


def test_the_gpu_counts(package: MakePackage) -> None:
    root = package(FILES)
    assert digest_for(KERNEL, "tilelang", "sm_90", root) != digest_for(KERNEL, "tilelang", "sm_90a", root)


def test_the_toolchain_counts(package: MakePackage, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(FILES)
    before = digest_of(KERNEL, "tilelang", root)
    monkeypatch.setitem(toolchain.PINS, "cutedsl", {"nvidia-cutlass-dsl": "9"})
    assert digest_of(KERNEL, "tilelang", root) == before
    monkeypatch.setitem(toolchain.PINS, "tilelang", {"tilelang": "9"})
    assert digest_of(KERNEL, "tilelang", root) != before
