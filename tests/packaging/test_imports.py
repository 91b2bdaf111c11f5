"""Imports go one way, and importing the package stays cheap."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import msa_tiles
from msa_tiles import paths

PACKAGE = Path(msa_tiles.__file__).parent
ANYTHING = None
READERS = ("sources", "syntax", "origins")
TREES = ("trees", "readable")
# What each part of msa_tiles may import, itself aside.
ALLOWED: dict[str, set[str] | None] = {
    "__init__": {"runtime", "library", "explaining", "trees"},  # when it is asked for them
    "explaining": {"ops", "call", "codegen", "library", "runtime", "spec", "quant", "names", *READERS, *TREES},
    "pack": {"names", "runtime", "spec", "paths", "sources", "errors"},
    "paths": set(),
    "syntax": set(),
    "origins": set(),
    "sources": {"scoped", "syntax"},
    "errors": set(),
    "trust": set(),
    "trees": {"files", "paths", "sources", "errors", "trust"},
    "readable": {"paths", "spec", "trees"},
    "files": set(),
    "console": set(),
    "interrupts": set(),
    "names": set(),
    "scoped": set(),
    "spec": {"names", "syntax"},
    "dsl": set(),
    "quant": set(),
    "reference": {"quant"},
    "tables": {"dsl", *READERS, "trees"},
    "codegen": {"spec", "files", "names", "paths", *READERS, "tables", *TREES},
    "skeletons": {"dsl"},
    "runtime": {"spec", "files", "names", "paths", "scoped", *READERS, "tables", "errors", *TREES, "trust"},
    "call": {"reference", "quant", "scoped"},
    "library": {"call", "scoped", "trees"},
    "launch": {"call", "quant", "runtime", "spec", *TREES},
    "ops": {"call", "library", "launch", "reference", "quant"},
    "nn": {"ops", "call"},
    # Of the runtime what is raised where no kernel serves a call, and of call how errors are worded.
    "compat": {"ops", "call", "quant", "runtime"},
    "simulator": set(),
    "verify": {"ops", "call", "files", "launch", "library", "runtime", "spec", "reference", "quant", "paths"},
    "bench": {"ops", "call", "compat", "launch", "names", "runtime", "spec", "reference", "quant", "paths", *TREES},
    "demo": ANYTHING,
    "matrix": ANYTHING,
    "commands": ANYTHING,
    "cli": ANYTHING,
    "__main__": ANYTHING,
}
# What both DSLs know: the words between kernels, and the table of a thread block.
SHARED_BY_DSLS = {("dsl", "words"), ("dsl", "table"), ("dsl", "four_bits")}
# What else kernels and device helpers of a DSL import: the DSL, and types to annotate with.
OF_DSL = {"tilelang": {"tilelang", "typing"}, "cutedsl": {"cutlass", "typing"}}
HEAVY = {"torch", "tilelang", "tvm", "tvm_ffi", "cutlass"}


def part_of(module: Path) -> str:
    relative = module.relative_to(PACKAGE).with_suffix("")
    return "skeletons" if "skeletons" in relative.parts else relative.parts[0]


@functools.cache
def imported(module: Path) -> tuple[str, ...]:
    """Absolute names of everything a file imports, anywhere in it."""
    return tuple(_imported(module))


def _imported(module: Path) -> Iterator[str]:
    package = ["msa_tiles", *module.relative_to(PACKAGE).parent.parts] if module.is_relative_to(PACKAGE) else []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def parts_imported(module: Path) -> set[str]:
    names = [name.split(".") for name in imported(module)]
    return {name[1] if len(name) > 1 else "__init__" for name in names if name[0] == "msa_tiles"}


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "_generated"))


@pytest.mark.parametrize("part", sorted(set(map(part_of, MODULES))))
def test_the_modules_of_a_part_import_only_what_it_may(part: str) -> None:
    assert part in ALLOWED, f"say in ALLOWED what msa_tiles.{part} may import"
    allowed = ALLOWED[part]
    for module in MODULES if allowed is not ANYTHING else ():
        if part_of(module) == part:
            # `from msa_tiles import __version__` names no part.
            parts = {name for name in parts_imported(module) if (PACKAGE / name).is_dir() or name in ALLOWED}
            assert parts <= allowed | {part, "__init__"}, module


def test_generated_kernels_import_device_helpers_and_their_dsl_only() -> None:
    kernels = sorted(paths.generated_dir().rglob("*.py"))
    assert kernels
    for kernel in kernels:
        assert parts_imported(kernel) <= {"dsl"}, kernel
        check_imports_of_dsl(kernel, kernel.relative_to(paths.generated_dir()).parts[0])


@pytest.mark.parametrize("dsl", OF_DSL)
def test_device_helpers_import_their_dsl_only(dsl: str) -> None:
    helpers = sorted((PACKAGE / "dsl" / dsl).rglob("*.py"))
    assert helpers
    for helper in helpers:
        check_imports_of_dsl(helper, dsl)


def check_imports_of_dsl(module: Path, dsl: str) -> None:
    names = [name.split(".") for name in imported(module)]
    assert {name[0] for name in names} <= OF_DSL[dsl] | {"msa_tiles"}, module
    assert {tuple(name[1:3]) for name in names if name[0] == "msa_tiles"} <= {("dsl", dsl)} | SHARED_BY_DSLS, module


def test_importing_does_not_load_what_it_does_not_need() -> None:
    """One after the other in one process: what is there after one was not there before it."""
    dsls = {"tilelang", "tvm", "cutlass"}
    unwanted = {
        **dict.fromkeys(("msa_tiles", "msa_tiles.cli", "msa_tiles.spec", "msa_tiles.codegen"), HEAVY),
        **dict.fromkeys(("msa_tiles.runtime", "msa_tiles.runtime.workers", "msa_tiles.runtime.parts"), HEAVY),
        **dict.fromkeys(
            ("msa_tiles.runtime.dispatch", "msa_tiles.ops", "msa_tiles.nn"), dsls | {"msa_tiles.compat", "matplotlib"}
        ),
        "msa_tiles.bench.charts": dsls | {"matplotlib"},
        "msa_tiles.compat.transformers": dsls | {"transformers"},
    }
    code = f"import importlib, sys\nfor name, unwanted in {unwanted!r}.items():"
    code += " importlib.import_module(name); print(name, *set(sys.modules) & unwanted)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(unwanted)


def module_name(module: Path) -> str:
    parts = ("msa_tiles", *module.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def top_level(module: Path) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The imports of a file at its top level, and those in a condition there, for types alone."""
    body = ast.parse(module.read_text()).body
    inner = [part for node in body if isinstance(node, ast.If) for part in node.body]
    plain, guarded = (
        [node for node in part if isinstance(node, ast.Import | ast.ImportFrom)] for part in (body, inner)
    )
    return plain, guarded


def modules_behind(module: Path, known: set[str], types: bool) -> set[str]:
    """The modules of the package that a file imports at its top level, or also for its ``types`` alone."""
    plain, guarded = top_level(module)
    found = set()
    for node in [*plain, *(guarded if types else ())]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return found & known


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            fresh = imports[waiting.pop()] - seen
            seen |= fresh
            waiting += fresh
        return seen

    behind = {name: reached(name) for name in imports}
    found = [{name, *(other for other in behind[name] if name in behind[other])} for name in sorted(imports)]
    return [circle for index, circle in enumerate(found) if len(circle) > 1 and circle not in found[:index]]


def test_circles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(imports) == [{"b", "c"}]


PACKAGES = sorted(set(map(part_of, MODULES)))
# The parts of the simulated machine hold each other: of its modules only the types go round.
TYPES_GO_ROUND = {"simulator"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_circles_inside_a_package(package: str) -> None:
    modules = [module for module in MODULES if part_of(module) == package]
    names = {module_name(module) for module in modules}
    for types in (False, True):
        found = circles({module_name(module): modules_behind(module, names, types) for module in modules})
        assert bool(found) == (types and package in TYPES_GO_ROUND), found
