"""Mistakes in the Python of a tree: each is told with the file and the line where its author mends it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from few_specs import copy_specs

import msa_tiles
from msa_tiles import cli, paths
from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.demo import kernels
from msa_tiles.origins import line_in
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.build import Job
from msa_tiles.runtime.cache import Cache
from msa_tiles.runtime.compiler import CompileError, compile_variant
from msa_tiles.runtime.facts import DeviceFacts
from msa_tiles.runtime.registry import default_registry

DECODE, COMBINE = "cutedsl/wgmma/sparse_decode.py", "cutedsl/simt/combine.py"
OPERAND = paths.PACKAGE / "dsl/cutedsl/operands/plain.py"
ROW = """op: sparse_decode
inherits: sparse_decode
kernels:
  - dsl: cutedsl
    targets: [sm90]
    precisions: [bf16]
    mma: wgmma
    copy: [tma_load]
    tile: {stages: 3}
    expect: [SYNCS]
    operands: {key_value: mine}
"""


@pytest.fixture(autouse=True)
def few(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation's specs are those of two operators, so that generating takes no time."""
    specs = copy_specs(tmp_path_factory.mktemp("few") / "specs", ["combine", "sparse_decode"])
    monkeypatch.setattr(paths, "specs_dir", lambda: specs)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def edited(text: str, old: str, new: str) -> tuple[str, int]:
    """A text with another word, and the line where it stands."""
    assert old in text, old
    return text.replace(old, new, 1), text.count("\n", 0, text.index(old)) + 1


def refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["generate", "--tree", str(tree)]) == 2
    return capsys.readouterr().err


# What is changed in which skeleton, lines from there to the one that is told, and what is said of it.
SKELETON_MISTAKES = {
    "a bracket left open": (COMBINE, "ELEMENTS[ELEMENT]", "ELEMENTS[ELEMENT", 0, "invalid Python: '\\[' was never"),
    "a parenthesis missing": (DECODE, "def sparse_decode(\n", "def sparse_decode\n", 7, "invalid Python: unmatched"),
    "an indentation": (
        COMBINE,
        "        self.lanes",
        "       self.lanes",
        0,
        "invalid Python: unindent does not match",
    ),
    "an indentation behind branches": (
        DECODE,
        "            read = cute.make_rmem_tensor(self.scored_blocks //",
        "          read = cute.make_rmem_tensor(self.scored_blocks //",
        0,
        "invalid Python: unindent does not match",
    ),
    "a block that nothing closes": (DECODE, "    # % endif\n", "", -3, "nothing closes this `if`: `# % endif` is miss"),
    "no statement": (DECODE, "# % endif", "# % edif", 0, "Encountered unknown tag 'edif'"),
    "half a condition": (DECODE, "# % if pieces\n", "# % if pieces ==\n", 0, "line statement: unexpected 'end of"),
    "a name that there is not": (DECODE, "# % if pieces\n", "# % if peices\n", 0, "'peices' is undefined"),
    "a filter that there is not": (
        DECODE,
        "# % if pieces\n",
        "# % if pieces|upper_case\n",
        0,
        "No filter named 'upper",
    ),
    "a value that there is not": (COMBINE, "<- precision.output", "<- precision.outpt", 0, "'outpt' is unknown"),
    "a name in its table": (COMBINE, "ROWS * head_dim //", "ROWZ * head_dim //", 0, "name 'ROWZ' is not defined"),
    "a table of nothing": (COMBINE, "    return Table(", "    Table(", None, "cta returns None, wanted a Table"),
    "a table that does not end": (
        COMBINE,
        '    """What a thread block is made of."""\n',
        "    return cta(head_dim)\n",
        0,
        "cta makes no table of head_dim=128: RecursionError",
    ),
    "a table without its mark": (COMBINE, "@declares\ndef cta", "def cta", None, "the function cta is not marked: wr"),
    "a word that tables have not": (
        COMBINE,
        "import WARP, Role,",
        "import WARP, Rle as Role,",
        0,
        "there is no Rle in",
    ),
    "another word for if": (DECODE, "  # % if not pieces", "  # % fi not pieces", 0, "no mark: `# % if …`"),
    "a mark without its space": (DECODE, "# % endif", "#% endif", 0, "no mark: `# % if …`"),
    "another arrow": (COMBINE, "# <- tile.rows", "#<- tile.rows", 0, "no mark: .* a value is `# <- path`"),
    "nothing at all": (COMBINE, (SKELETONS / COMBINE).read_text(), "", 0, "the skeleton is empty"),
}


# Of an operator: what stands in the place of a tile or of dims, and what is said. Rounded down, threads, rows or blocks
# would be left out that nothing else works on.
RESTS = {
    "rows of a thread block": (
        "combine", "rows: 16", "rows: 10", r"head_dim // \(VECTOR \* WARP\) leaves a rest: 640 is no multiple of 256"
    ),
    "a head dim": ("combine", "64", "104", "leaves a rest: 1664 is no multiple of 256"),
    "rows of an insertion": ("append_kv", "rows: 16", "rows: 10", "leaves a rest: 640 is no multiple of 256"),
    "blocks of a thread": ("build_schedule", "blocks: 2048", "blocks: 1400", "THREADS leaves a rest: 1400 is no"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESTS)
def test_numbers_of_a_row_that_leave_a_rest(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, old, new, sentence = RESTS[name]
    specs = copy_specs(tmp_path / "few", [op])
    monkeypatch.setattr(paths, "specs_dir", lambda: specs)
    shipped = (specs / f"operators/{op}.yaml").read_text()
    assert old in shipped
    write(tmp_path / f"tree/specs/operators/{op}.yaml", shipped.replace(old, new))
    assert re.search(sentence, refused(tmp_path / "tree", capsys))


@pytest.mark.parametrize("beside", [False, True])
def test_a_row_that_no_target_can_run(beside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row without targets is for those that can run it, of which there may be none in one of its precisions."""
    row = re.sub("    (targets|operands).*\n", "", ROW.replace("[bf16]", "[bf16, q16kv8]"))
    write(tmp_path / "specs/operators/sparse_decode.yaml", row.replace("stages: 3", "stages: 6"))
    if beside:
        combine = row[: row.index("    mma")].replace("sparse_decode", "combine").replace(", q16kv8", "")
        write(
            tmp_path / "specs/operators/combine.yaml",
            combine + "    mma: simt\n    compute: float32\n    tile: {rows: 8, unroll: 16}\n",
        )
    told = refused(tmp_path, capsys)
    cells = re.findall(r"sparse_decode\.yaml:4: (sparse_decode\.\S+): \d+ bytes of shared memory at .* exceed", told)
    assert cells == ["sparse_decode.cutedsl.sm90.bf16"]
    assert not (tmp_path / "generated").exists()


@pytest.mark.parametrize("name", SKELETON_MISTAKES)
def test_mistakes_in_a_skeleton(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skeleton, old, new, further, sentence = SKELETON_MISTAKES[name]
    text, line = edited((SKELETONS / skeleton).read_text(), old, new)
    path = write(tmp_path / "skeletons" / skeleton, text)
    told = refused(tmp_path, capsys)
    line = 1 if further is None else line + further  # it has no place where something is missing
    assert re.search(
        rf"{re.escape(str(path))}:{line}\b.*{sentence}|{sentence}.* \({re.escape(str(path))}:{line}\)", told
    )
    assert len(re.findall(re.escape(str(path)), told)) == 1, "it is told once, for all kernels of the skeleton"


def test_of_what_is_no_python_nothing_else_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither that it does not read the row's tile, nor what stands in the marks of others."""
    text, line = edited((SKELETONS / COMBINE).read_text(), "ELEMENTS[ELEMENT]", "ELEMENTS[ELEMENT")
    for mark in ("  # <- tile.rows", "  # <- tile.unroll"):
        text, _ = edited(text, mark, "")
    path = write(tmp_path / "skeletons" / COMBINE, text)
    told = refused(tmp_path, capsys)
    assert f"{path}:{line}: the skeleton renders to invalid Python" in told and "read by" not in told
    write(path, text.replace("ELEMENTS[ELEMENT", "ELEMENTS[ELEMENT]"))
    assert "tile.rows is read by neither" in refused(tmp_path, capsys)


# What the tree's operand is, the line that is told, counted from the end where it is negative, and what is said.
OPERAND_MISTAKES: dict[str, tuple[Callable[[str], str | bytes], int, str]] = {
    "a parenthesis missing": (lambda text: text + "\ndef f(:\n", -1, "is no valid Python: invalid syntax"),
    "an indentation": (lambda text: text + "\n   x = 1\n", -1, "is no valid Python: unindent does not"),
    "a character that no source holds": (lambda text: text + "\n\0\n", -1, "is no valid Python: .*null bytes"),
    "another encoding": (lambda text: text.encode() + "\n# é\n".encode("latin-1"), -1, "is not UTF-8 text"),
    "a byte order mark": (lambda text: "\ufeff" + text, 1, "begins with a byte order mark"),
    "an operand that there is not": (
        lambda text: f"{text}\nfrom msa_tiles.dsl.cutedsl.operands import none\n@declares\ndef f():\n    return none\n",
        -4,
        "there is no operand none in msa_tiles.dsl.cutedsl.operands",
    ),
    "a name that there is not": (
        lambda text: f"{text}\n@declares\ndef f(a=ABSENT):\n    return a\n",
        -2,
        "'ABSENT' is",
    ),
    "a number for an element": (
        lambda text: f"{text}\n@declares\ndef multiplied(name):\n    return 16\n",
        1,
        "multiplied returns 16, wanted the name of an element",
    ),
    "itself": (
        lambda text: f"from msa_tiles.dsl.cutedsl.operands import mine\n{text}\n@declares\ndef f():\n    return mine\n",
        1,
        "imports itself, or what imports it",
    ),
    "no endings": (lambda text: text.replace("TENSORS =", "ENDINGS ="), 1, "the operand does not say its TENSORS"),
    "a function that fails": (
        lambda text: f"{text}\n@declares\ndef multiplied(name):\n    return nam\n",
        -1,
        "multiplied fails: NameError: name 'nam' is not defined",
    ),
}


@pytest.mark.parametrize("name", OPERAND_MISTAKES)
def test_mistakes_in_an_operand(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, line, sentence = OPERAND_MISTAKES[name]
    write(tmp_path / "specs/operators/sparse_decode.yaml", ROW)
    path = write(tmp_path / "operands/cutedsl/mine.py", change(OPERAND.read_text()))
    line = line if line > 0 else path.read_bytes().count(b"\n") + 1 + line
    told = refused(tmp_path, capsys)
    assert re.search(rf"{re.escape(str(path))}:{line}: .*{sentence}", told) and told.count(str(path)) == 1


def test_mistakes_in_what_an_operand_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tree beneath, which is not read as a whole."""
    beneath = write(tmp_path / "a/operands/cutedsl/helper.py", "X = (\n").parents[2]
    write(tmp_path / "a/generated/operands/cutedsl/helper.py", "\nX = (\n")
    imports = f"from msa_tiles.dsl.cutedsl.operands import helper\n{OPERAND.read_text()}"
    write(tmp_path / "b/operands/cutedsl/mine.py", imports)
    write(tmp_path / "b/specs/operators/sparse_decode.yaml", ROW)
    assert cli.main(["generate", "--tree", str(beneath), "--tree", str(tmp_path / "b")]) == 2
    assert "operands/cutedsl/helper.py:2: is no valid Python: '(' was never closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("# é".encode("latin-1"), "3: is not UTF-8 text"), (b"\xef\xbb\xbf", "1: begins with a byte order mark")],
)
def test_a_skeleton_in_another_encoding(
    content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (SKELETONS / COMBINE).read_bytes()
    text = content + text if sentence[0] == "1" else b"\n\n" + content + b"\n" + text
    path = write(tmp_path / "skeletons" / COMBINE, text)
    assert f"{path}:{sentence}" in refused(tmp_path, capsys)


def test_directories_and_files_in_the_place_of_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (f"skeletons/{COMBINE}", "operands/cutedsl/mine.py"):
        (tmp_path / name).mkdir(parents=True)
        assert f"{tmp_path / name}: is a directory; wanted a file" in refused(tmp_path, capsys)
        shutil.rmtree(tmp_path / name)
    shutil.rmtree(tmp_path / "operands")
    write(tmp_path / "operands/cutedsl", "")
    assert f"{tmp_path / 'operands/cutedsl'}: is a file; wanted a directory" in refused(tmp_path, capsys)
    shutil.rmtree(tmp_path / "operands")
    path = write(tmp_path / "specs/operators", "")
    assert f"{path}: is a file; wanted a directory" in refused(tmp_path, capsys)
    shutil.rmtree(tmp_path / "specs")
    for folder in ("specs", "generated"):
        path = write(tmp_path / folder, "")
        assert f"{path} is a file, and in a tree a directory" in refused(tmp_path, capsys)
        path.unlink()


def test_lines_of_kernels_come_from_those_of_their_skeletons() -> None:
    """All code that is there once in each; what is there twice is one of its twins."""
    for cell in default_registry().cells:
        algorithm = cell.id.split(".")[4:]
        source = (SKELETONS / cell.dsl / cell.mma / f"{'_'.join((cell.op, *algorithm))}.py").read_text().splitlines()
        made = cell.text().splitlines()
        if cell.target != "sm90" or cell.op not in ("combine", "sparse_decode", "build_schedule"):
            continue
        alone = [line for line in made if line.strip() and source.count(line) == made.count(line) == 1]
        assert len(alone) > 20
        for line in alone[:: len(alone) // 10]:
            at = line_in("\n".join(source), "\n".join(made), made.index(line) + 1)
            assert at == source.index(line) + 1, (cell.id, line)
    assert line_in("STAGES = 3  # <- tile.stages\n", "# made\nSTAGES = 5\n", 2) == 1
    assert line_in("a = 1\n", "# made\na = 1\n", 1) is None and line_in("a = 1\n", "a = 1\n", 9) is None


# What is changed in the skeleton of a DSL, and what is said of it; helpers have a line of their own.
KERNEL_MISTAKES = {
    "cutedsl": (
        ("cute.arch.thread_idx()", "cute.arxh.thread_idx()", "AttributeError: .* has no attribute 'arxh'"),
        ("cute.arch.fmax(", "cute.arch.fmaxx(", "AttributeError: .* has no attribute 'fmaxx'"),
        ("if weight[u] != -Float32.inf", "if weigth[u] != -Float32.inf", "name 'weigth' is not defined"),
        ("import cutlass\n", "import absent_module\n", "ModuleNotFoundError: No module named 'absent_module'"),
        ("wide(out[token, head, None], lane)", "wide(out[token, head, 0], lane)", "vector.py:[0-9]+, called at "),
    ),
    "tilelang": (
        ("T.pdl_sync()", "T.pdl_synk()", "AttributeError: .* has no attribute 'pdl_synk'"),
        ("tx % lanes", "txx % lanes", "NameError: name 'txx' is not defined"),
        ("import high_half,", "import high_halff,", "ImportError: cannot import name 'high_halff'"),
    ),
}


@pytest.mark.parametrize("dsl", KERNEL_MISTAKES)
def test_mistakes_that_compiling_finds(dsl: str, tmp_path: Path) -> None:
    if reason := toolchain.missing(dsl):
        pytest.skip(reason)
    skeleton = f"{dsl}/simt/combine.py"
    for number, (old, new, sentence) in enumerate(KERNEL_MISTAKES[dsl]):
        tree = tmp_path / str(number)
        text, line = edited((SKELETONS / skeleton).read_text(), old, new)
        path = write(tree / "skeletons" / skeleton, text)
        assert cli.main(["generate", "--tree", str(tree), "--dsl", dsl, "--target", "sm90"]) == 0
        with msa_tiles.use_tree(tree):
            [cell] = default_registry().select("combine", dsl, "sm90")
            at = cell.text().splitlines().index(next(each for each in cell.text().splitlines() if new.strip() in each))
            with pytest.raises(CompileError, match=sentence) as caught:
                compile_variant(cell, {"head_dim": 64}, "sm_90a", Cache(tmp_path / "cache"))
        assert f"{cell.file}:{at + 1}, which comes from {path}:{line}" in str(caught.value)


def test_a_generated_file_that_is_no_python_does_not_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "specs/operators/sparse_decode.yaml", ROW)
    write(tmp_path / "operands/cutedsl/mine.py", OPERAND.read_text())
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    for name in ("generated/cutedsl/sm90/sparse_decode_bf16.py", "generated/operands/cutedsl/mine.py"):
        text = (tmp_path / name).read_text()
        write(tmp_path / name, text + "\nx = (\n")
        sentence = f"{tmp_path / name}:{text.count(chr(10)) + 2}: is no valid Python"
        with msa_tiles.use_tree(tmp_path):
            [cell] = default_registry().select("sparse_decode", "cutedsl", "sm90", "bf16")
            with pytest.raises(CompileError, match=re.escape(sentence)):
                compile_variant(cell, cell.ci[0], "sm_90a", Cache(tmp_path / "cache"))
        assert cli.main(["explain", "sparse_decode", "--device", "sm90", "--tree", str(tmp_path)]) == 2
        assert sentence in capsys.readouterr().err
        write(tmp_path / name, text)


def test_the_demo_says_which_kernels_are_those_of_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(kernels.of_trees()) == []
    write(tmp_path / "skeletons" / COMBINE, (SKELETONS / COMBINE).read_text() + "\n\nOWN = 1\n")
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    with msa_tiles.use_tree(tmp_path):
        [sentence] = kernels.of_trees()
        assert sentence.startswith(
            f"2 kernels of the tree {tmp_path.resolve()}, which go before those beneath: combine."
        )
        assert "neither a shipped one nor one of a tree" in kernels.behind(torch.device("cpu"), "bf16")
        monkeypatch.setattr(kernels, "device_facts", lambda *_: DeviceFacts("a GPU", "sm90", 132, (9, 0)))
        calls = []
        cells = default_registry().select("combine", "cutedsl", "sm90") + default_registry().select("sparse_decode")[:1]
        monkeypatch.setattr(
            kernels, "jobs_for", lambda call, *_: calls.append(call) or [Job(cell, cell.ci[0]) for cell in cells]
        )
        said = kernels.behind(torch.device("cuda"), "fp8")
        assert calls == ["select_blocks,precision=fp8", "sparse_attention,precision=fp8"]
        assert said == (
            f"these calls may run combine.cutedsl.sm90.bf16 (of the tree {tmp_path.resolve()}), {cells[1].id} (shipped)"
        )
