"""What a kernel file compiles from: its code and the sources of the device helpers that it imports."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from msa_tiles.scoped import held
from msa_tiles.syntax import located, text_of, tree_of

PACKAGE = Path(__file__).resolve().parent
_HELPERS = "msa_tiles.dsl"
OPERANDS = ".operands"
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_answers: ContextVar[dict | None] = ContextVar("_answers", default=None)


@contextlib.contextmanager
def unchanging() -> Iterator[None]:
    """Within the block, helpers and operands are looked up and read once: whoever enters it knows that they stay."""
    with held(_answers, {} if (known := _answers.get()) is None else known):
        yield


def once_where_unchanging(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Remember what a function answers, of what lies on disk, as long as that is `unchanging`."""

    @functools.wraps(function)
    def asked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        known = _answers.get()
        if known is None:
            return function(*args, **kwargs)
        key = (function, args, tuple(kwargs.items()))
        if key not in known:
            known[key] = function(*args, **kwargs)
        answer: _Answer = known[key]
        return answer

    return asked


def code_of(text: str, package: Path = PACKAGE) -> list[bytes]:
    """sha256 of the syntax of a kernel file (or of its body), then of that of the helper modules it imports, directly
    or not, by name.

    Comments and docstrings compile to nothing and are no part of it.
    """
    found = _helpers(text, package)
    return [_sha256_of("", text), *(_sha256_of(f"{name}\n", found[name]) for name in sorted(found))]


@functools.lru_cache(maxsize=512)
def _sha256_of(name: str, source: str) -> bytes:
    return hashlib.sha256(f"{name}{syntax_of(source)}".encode()).digest()


@functools.lru_cache(maxsize=4)  # not more: each garbage collection would look at every node of every tree
def parsed(source: str) -> ast.Module:
    """A module's syntax tree, for all who read one source one after the other: not to be changed."""
    return tree_of(source)


class _Read(NamedTuple):
    """What is asked of a source again and again."""

    syntax: str
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]  # (level, module, names); `import a`: module a, no names


@functools.lru_cache(maxsize=512)
def _read(source: str) -> _Read:
    tree = parsed(source)
    return _Read(_written(tree), tuple(_imports(tree)))


def syntax_of(source: str) -> str:
    """A module's syntax tree as text, without comments, docstrings and layout, whatever Python reads it."""
    return _read(source).syntax


def _written(node: object) -> str:
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {node.value!r}"
    if isinstance(node, ast.AST):
        # Fields that hold nothing are left out: later versions of Python add some to old nodes.
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:
                fields.append(f"{name}={_written(value)}")
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join([_written(item) for item in node if not _is_text(item)])}]"
    return repr(node)


def _is_text(node: object) -> bool:
    """Whether a statement is a docstring, or another string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def helpers_of(text: str, package: Path = PACKAGE) -> list[str]:
    """Names of the helper modules that a kernel imports, directly or not, in order."""
    return sorted(_helpers(text, package))


def texts_of(file: Path, helpers: Sequence[str], package: Path = PACKAGE) -> dict[str, str]:
    """sha256 of the text of a kernel file, under "", and of these helper modules, under their names.

    Two that are equal are of equal code; different ones may be, too.
    """
    files = {name: module_file(name, package) if name else file for name in ("", *helpers)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path is not None}


def header_of(text: str) -> str:
    """The comment lines (and the blank line) above the module docstring."""
    lines = text.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("#") and line.strip()), len(lines))
    return "".join(lines[:count])


def without_header(text: str) -> str:
    return text[len(header_of(text)) :]


@once_where_unchanging
def source_at(file: Path) -> str:
    """The text of a helper or an operand. Raises SourceError where it is no text."""
    return text_of(file)


@unchanging()
def _helpers(text: str, package: Path) -> dict[str, str]:
    """Sources of the helper modules that a kernel imports, directly or not, by name. Raises SourceError of one."""
    found: dict[str, str] = {}
    pending = list(_imported_helpers(text, _HELPERS, package))
    while pending:
        name = pending.pop()
        if name in found:
            continue
        file = module_file(name, package)
        assert file is not None, f"{name} was found"
        found[name] = source_at(file)
        with located(file, found[name]):
            pending += _imported_helpers(found[name], name, package)
    return found


@once_where_unchanging
def _imported_helpers(source: str, importer: str, package: Path) -> tuple[str, ...]:
    """Names of the helper modules that a source imports, each once."""
    is_package = (module_file(importer, package) or PACKAGE).name == "__init__.py"
    return tuple(name for name in _candidates(source, importer, is_package) if module_file(name, package))


@functools.lru_cache(maxsize=1024)
def _candidates(source: str, importer: str, is_package: bool) -> tuple[str, ...]:
    """What could be helper modules among all that a source names in its imports, each once."""
    found: dict[str, None] = {}
    for level, module, imported in _read(source).imports:
        base = module
        if level:
            parents = importer.split(".")
            parents = parents[: len(parents) - level + is_package]
            base = ".".join([*parents, *filter(None, [module])])
        for name in [base, *(f"{base}.{each}" for each in imported)]:
            parts = name.split(".")
            # Importing a.b.c runs a and a.b too; only what lies below the helpers' package counts.
            found |= dict.fromkeys(".".join(parts[:end]) for end in range(2, len(parts) + 1))
    return tuple(name for name in found if f"{name}.".startswith(f"{_HELPERS}."))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", tuple(alias.name for alias in node.names)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, without what is in expressions, which are most of a tree."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, name, None)
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from _statements(each)


@once_where_unchanging
def module_file(name: str, package: Path = PACKAGE) -> Path | None:
    """The file of a helper module or an operand, by its full name; None where it is neither."""
    if not f"{name}.".startswith(f"{_HELPERS}."):
        return None
    base = os.path.join(package, *name.split(".")[1:])
    for candidate in (f"{base}.py", os.path.join(base, "__init__.py")):
        if os.path.isfile(candidate):
            return Path(candidate)
    folder, _, last = name.rpartition(".")
    return operand_file(last, folder, package) if folder.endswith(OPERANDS) else None


def operands_of(tree: Path, dsl: str) -> Path:
    """Where a tree of specs, or of generated kernels, has operands of its own."""
    return tree / OPERANDS[1:] / dsl


def operands_in(text: str) -> dict[str, str]:
    """The module of each operand that a kernel imports, by the role that it has there."""
    found = re.findall(
        rf"^from {re.escape(_HELPERS)}\.\w+{re.escape(OPERANDS)} import (\w+) as (\w+)$", text, re.MULTILINE
    )
    return {role: module for module, role in found}


def search_operands(tree: Path) -> None:
    """Let operands be found in a tree too, behind those that are found already."""
    for folder in sorted((tree / OPERANDS[1:]).glob("*")):
        if (PACKAGE / "dsl" / folder.name / OPERANDS[1:]).is_dir() and folder.is_dir():
            package = importlib.import_module(f"{_HELPERS}.{folder.name}{OPERANDS}")
            if str(folder) not in package.__path__:
                package.__path__ = [*package.__path__, str(folder)]
                importlib.invalidate_caches()


def forget_operands(tree: Path | None = None) -> None:
    """Find operands no more in a tree, or in any. What was imported from there is imported anew when it is needed."""
    for name, package in list(sys.modules.items()):
        if not (name.endswith(OPERANDS) and re.fullmatch(rf"{_HELPERS}\.\w+{re.escape(OPERANDS)}", name)):
            continue
        own = str(Path(str(package.__file__)).parent)
        left = [each for each in package.__path__ if each == own or (tree and not Path(each).is_relative_to(tree))]
        gone = set(package.__path__) - set(left)
        package.__path__ = left
        for other, module in list(sys.modules.items()) if gone else ():
            if other.startswith(f"{name}.") and str(Path(str(module.__file__)).parent) in gone:
                del sys.modules[other]
                package.__dict__.pop(other.rpartition(".")[2], None)


@once_where_unchanging
def operand_file(name: str, module: str, package: Path = PACKAGE) -> Path | None:
    """The file of an operand of a package of operands: the helpers' own, or one along the package's search path.

    Whoever brings operands from elsewhere appends their folder to the `__path__` of msa_tiles.dsl.<dsl>.operands.
    """
    folders = [package.joinpath(*module.split(".")[1:])]
    with contextlib.suppress(ModuleNotFoundError):
        folders += map(Path, importlib.import_module(module).__path__)
    return next((path for folder in folders if (path := folder / f"{name}.py").is_file()), None)
