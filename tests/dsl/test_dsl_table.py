"""The tables of thread blocks (msa_tiles.dsl.table), and reading them from a kernel's text without its DSL."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_tiles.dsl.table import (
    TILELANG,
    Buffer,
    Columns,
    Pipeline,
    Role,
    Table,
    TableError,
    buffer,
    commits,
    describe,
    lane,
    threads,
    warps,
)
from msa_tiles.tables import docstring_of, table_of

ROLES = (Role("reader", 4, "multiplies"), Role("loader", 1, "loads", registers=40))
TILES = buffer("tiles", "bfloat16", align=1024, note="swizzled", stages=3, rows=64, columns=64)
RAW = buffer("raw", "float8_e4m3fn", columns=9)
RING = Pipeline("ring", 3, (lane("loader"), threads("loader")), (warps("reader"),), ("tiles",))
ONCE = Pipeline("once", 1, (threads("reader"),))


def test_what_a_table_knows() -> None:
    table = Table(ROLES, (ONCE, RING), (RAW, TILES))
    assert (table.threads, table.registers) == (160, 32 * 40)
    assert (table.first_warp("reader"), table.first_warp("loader"), table.threads_of("reader")) == (0, 4, 128)
    assert table.barriers == [("once_full", 128), *[("ring_full", 1 + 32)] * 3, *[("ring_free", 4)] * 3]
    assert [table.place(name) for name in ("once_full", "ring_full", "ring_free")] == [0, 1, 4]
    assert table.depth("ring") == 3
    assert (table.bytes_of("ring"), table.bytes_of("once")) == (64 * 64 * 2, 0)
    assert Table(ROLES, (RING._replace(bytes=100),), (TILES,)).bytes_of("ring") == 100
    # Nine bytes, the tiles where their alignment lets them begin, seven barriers.
    assert table.shared_memory == 1024 + 3 * 64 * 64 * 2 + 7 * 8
    with pytest.raises(TableError, match="no barrier once_free"):
        table.place("once_free")


def test_how_tilelang_lays_a_table_out() -> None:
    small = buffer("small", "float32", columns=33 * 128)
    own = buffer("own", "int32", static=True, fields=2)
    table = Table(ROLES, (ONCE, RING), (small, own, TILES), static=TILELANG)
    # Barriers, an array for each of their names, and the array of eight bytes: less than a kilobyte. The largest buffer
    # comes first, so that nothing is lost where the next one begins.
    assert table.shared_memory == 1024 + TILES.bytes + small.bytes
    tail = TILES._replace(dims={"rows": 8})
    assert Table(ROLES, (), (tail, small), static=TILELANG).shared_memory == 17 * 1024 + tail.bytes
    many = Pipeline("many", 64, (threads("reader"),), (warps("reader"),))
    assert Table(ROLES, (many, ONCE), (), static=TILELANG).shared_memory == 2048
    assert table.arrivals("ring_full") == [1 + 32] * 3
    with pytest.raises(TableError, match="no barrier once_free"):
        table.arrivals("once_free")


@pytest.mark.parametrize(
    ("pipelines", "buffers", "sentence"),
    [
        ((RING,), (), "ring fills tiles, which is no buffer"),
        ((RING._replace(depth=2),), (TILES,), "ring has 2 stages, its buffer tiles another number"),
        ((RING._replace(full=()),), (TILES,), "nobody arrives at the pipeline ring"),
        ((RING._replace(free=(warps("writer"),)),), (TILES,), "ring waits for writer, which is no role"),
        ((RING._replace(bytes=64 * 64 * 2 + 1),), (TILES,), "ring brings 8193 bytes a stage, its buffers hold 8192"),
        ((RING, RING), (TILES,), "two of the table's pipelines have one name"),
        ((), (RAW, RAW), "two of the table's buffers have one name"),
    ],
)
def test_a_table_that_contradicts_itself(
    pipelines: tuple[Pipeline, ...], buffers: tuple[Buffer, ...], sentence: str
) -> None:
    with pytest.raises(TableError, match=sentence):
        Table(ROLES, pipelines, buffers)


def test_two_roles_of_one_name() -> None:
    with pytest.raises(TableError, match="two of the table's roles have one name"):
        Table((*ROLES, ROLES[0]), ())


def test_every_kind_of_arrival_counts() -> None:
    counts = {lane("reader"): 1, warps("reader"): 4, threads("reader"): 128, commits("loader"): 1}
    for arrival, count in counts.items():
        assert Table(ROLES, (Pipeline("one", 1, (arrival,)),)).barriers == [("one_full", count)]


def test_what_a_docstring_says() -> None:
    short, long = Table(ROLES, (RING,), (TILES,)), Table(ROLES, (ONCE, RING), (RAW, TILES))
    assert describe([short, long]) == [
        "Warps",
        "  0 .. 3  reader: multiplies",
        "  4       loader (40 registers): loads",
        "",
        "Pipelines",
        "  once: 1 deep, full by every thread of reader, freed by nobody (some variants)",
        "  ring: 3 deep, full by 1 lane of loader + every thread of loader + bytes of tiles, freed by 1 lane of each "
        "warp of",
        "      reader",
        "",
        "Shared memory",
        "  raw [columns] float8_e4m3fn (some variants)",
        "  tiles [stages, rows, columns] bfloat16, swizzled",
        "  barriers",
    ]


def test_what_a_docstring_says_of_tables_that_differ() -> None:
    both = Pipeline("s", 2, (lane("loader"), threads("loader")))
    fewer = (ROLES[0]._replace(warps=8), ROLES[1])
    tiles = Columns("S", 2, 64, "of two products")
    assert describe([Table(ROLES, (both._replace(full=both.full[:1]),)), Table(fewer, (both,), (), (tiles,))]) == [
        "Warps",
        "  0 .. 3 or 0 .. 7 reader: multiplies",
        "  4 or 8  loader (40 registers): loads",
        "",
        "Pipelines",
        "  s: 2 deep, full by 1 lane of loader + every thread of loader (some variants), freed by nobody",
        "",
        "Shared memory",
        "  barriers",
        "",
        "Tensor memory",
        "  S [2, columns], of two products (some variants)",
    ]
    assert describe([Table(ROLES, ())]) == [
        "Warps",
        "  0 .. 3  reader: multiplies",
        "  4       loader (40 registers): loads",
    ]


def test_tensor_memory() -> None:
    table = Table(ROLES, (), (), (Columns("S", 2, 64), Columns("O", 1, 128)))
    assert (table.tensor_memory, table.column("S"), table.column("O")) == (256, 0, 128)
    with pytest.raises(TableError, match="no tiles P in tensor memory"):
        table.column("P")
    with pytest.raises(TableError, match="two of the table's tiles of tensor memory have one name"):
        Table(ROLES, (), (), (Columns("S", 2, 64), Columns("S", 1, 32)))


KERNEL = '''"""A kernel."""

import a_dsl_that_is_not_there
from msa_tiles.dsl.cutedsl.operands import small as key_value
from msa_tiles.dsl.table import Role, Table, declares

STAGES = 2
ELEMENT = a_dsl_that_is_not_there.Element


@declares
def cta(width):
    keys = key_value.parts("k", STAGES, width)
    return Table((Role("all", key_value.WARPS, "everything"),), keys.pipelines, keys.buffers)


@a_dsl_that_is_not_there.kernel
def kernel():
    pass
'''
OPERAND = '''"""An operand."""

import a_dsl_that_is_not_there
from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, lane

WARPS = 3


@declares
def parts(name, stages, width):
    """Its share."""
    own = buffer(f"{name}_tiles", "int32", stages=stages, width=width)
    return Parts((Pipeline(name, stages, (lane("all"),), fills=(own.name,)),), (own,))


class Operand(a_dsl_that_is_not_there.Base):
    pass
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "msa_tiles" / "dsl" / "cutedsl" / "operands"
    folder.mkdir(parents=True)
    (folder / "small.py").write_text(OPERAND)
    return tmp_path / "msa_tiles"


def test_a_table_is_read_without_the_dsl(package: Path) -> None:
    table_of_variant = table_of(KERNEL, package)
    assert table_of_variant is not None
    table = table_of_variant(width=8)
    assert (table.threads, table.shared_memory, table.bytes_of("k")) == (96, 2 * 8 * 4 + 2 * 8, 32)
    assert table_of('"""No table."""\n', package) is None


def test_an_operand_of_several_files(package: Path) -> None:
    """What an operand's `__all__` names is its own, wherever it stands; what it imports besides is not."""
    (package / "dsl/cutedsl/operands/small.py").rename(package / "dsl/cutedsl/pieces.py")
    line = "from msa_tiles.dsl.cutedsl.pieces import WARPS, Operand, parts\n"
    operand = package / "dsl/cutedsl/operands/small.py"
    operand.write_text(f'{line}\n__all__ = ["WARPS", "Operand", "parts"]\n')
    table_of_variant = table_of(KERNEL, package)
    assert table_of_variant is not None
    assert (table_of_variant(width=8).threads, table_of_variant(width=8).bytes_of("k")) == (96, 32)
    pieces = package / "dsl/cutedsl/pieces.py"
    pieces.write_text(pieces.read_text().replace("    pass", '    """A docstring."""'))
    assert docstring_of(operand, "Operand", package) == "A docstring."
    assert docstring_of(operand, "Other", package) is docstring_of(operand, "WARPS", package) is None
    operand.write_text(f'{line}\n__all__ = ["WARPS", "Operand"]\n')
    table_of_variant = table_of(KERNEL.replace("STAGES = 2", "STAGES = 3"), package)
    assert table_of_variant is not None
    with pytest.raises(TableError, match="small declares no parts"):
        table_of_variant(width=8)


HELPER = '''"""A helper."""

import a_dsl_that_is_not_there
from msa_tiles.dsl.table import WARP, Role, declares

WARPS = 2


@declares
def role_of(name):
    return Role(name, WARPS, f"{WARP} lanes a warp")
'''


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("from msa_tiles.dsl.cutedsl.helper import role_of as role", 'role("all")'),
        ("from msa_tiles.dsl.cutedsl import helper", 'helper.role_of("all")'),
        ("from msa_tiles.dsl.cutedsl.helper import WARPS", 'Role("all", WARPS, "32 lanes a warp")'),
    ],
)
def test_a_table_of_what_helpers_declare(line: str, call: str, package: Path) -> None:
    (package / "dsl" / "cutedsl" / "helper.py").write_text(HELPER)
    kernel = KERNEL.replace("STAGES = 2", f"{line}\n\nSTAGES = 2")
    kernel = kernel.replace('Role("all", key_value.WARPS, "everything")', call)
    table_of_variant = table_of(kernel, package)
    assert table_of_variant is not None
    assert (table_of_variant(width=8).threads, table_of_variant(width=8).roles["all"].does) == (64, "32 lanes a warp")


@pytest.mark.parametrize(
    ("old", "new"),
    [("STAGES, width", "ELEMENT, width"), ("cta(width)", "cta(height)"), ("key_value.WARPS", "key_value.NONE")],
)
def test_a_table_of_other_things_than_numbers(old: str, new: str, package: Path) -> None:
    table_of_variant = table_of(KERNEL.replace(old, new), package)
    assert table_of_variant is not None
    with pytest.raises(TableError, match="cta is no plain Python over marked functions and constants"):
        table_of_variant(width=8)
