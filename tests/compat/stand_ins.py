"""A server's real files without the server: chosen modules come from its package, anything else they import is hollow.

A hollow module has every name; what stands there can be called, subscripted, subclassed and used as a decorator, and
does nothing. Tests put in functions and objects where more is needed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Hollow:
    """Anything that a module imports and does not use in a test."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Itself, or what it decorates."""
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __getitem__(self, key: Any) -> Hollow:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    __or__ = __ror__ = __getitem__


class HollowModule(types.ModuleType):
    """A module, and a package, that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()


class Source:
    """The package of a server: a directory that holds it, or a wheel."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None

    def read(self, module: str) -> tuple[str, str]:
        """The text of a module, and its path in the package; nothing, for a directory without `__init__.py`."""
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            with contextlib.suppress(KeyError, FileNotFoundError):
                found = (self.place / name).read_bytes() if self._wheel is None else self._wheel.read(name)
                return found.decode(), name
        if any(name.startswith(f"{path}/") for name in self.names()):
            return "", f"{path}/__init__.py"
        raise ImportError(f"{self.place} has no module {module}")

    def names(self) -> list[str]:
        """The paths of all its Python files."""
        if self._wheel is None:
            return [str(path.relative_to(self.place)) for path in self.place.rglob("*.py")]
        return [name for name in self._wheel.namelist() if name.endswith(".py")]


def source_of(package: str, variable: str) -> Source:
    """Where the environment or the installation has a package; skips the test where neither has."""
    named = os.environ.get(variable)
    if named:
        place = Path(named)
        if not place.exists():
            pytest.fail(f"{variable}: nothing is at {named}")
        return Source(place)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed, and {variable} names neither its wheel nor a directory with it")
    return Source(Path(next(iter(spec.submodule_search_locations))).parent)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads `real` modules of a package, and those beneath names that end in a dot, and hollow ones for the others."""

    def __init__(self, source: Source, package: str, real: tuple[str, ...], hollow: tuple[str, ...] = ()) -> None:
        self.source, self.package, self.real, self.hollow = source, package, real, hollow

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in (self.package, *self.hollow):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def is_real(self, name: str) -> bool:
        return any(name == one or (one.endswith(".") and name.startswith(one)) for one in self.real)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name) if self.is_real(spec.name) else HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        if self.is_real(module.__name__):
            text, path = self.source.read(module.__name__)
            package = path.endswith("/__init__.py")
            module.__package__ = module.__name__ if package else module.__name__.rpartition(".")[0]
            module.__file__ = f"{self.source.place}/{path}"
            # Triton compiles the source of functions, which is no file where it lies in a wheel.
            linecache.cache[module.__file__] = len(text), None, text.splitlines(keepends=True), module.__file__
            exec(compile(text, module.__file__, "exec"), vars(module))


@contextlib.contextmanager
def standing_in(
    finder: Finder, names: dict[str, dict[str, Any]], leaving: Callable[[str], bool] = lambda name: False
) -> Iterator[None]:
    """Have imports of the finder's packages come from it; ``names`` are what hollow modules hold besides.

    Afterwards `sys.modules` is as before, without those and without what ``leaving`` names.
    """
    packages = (finder.package, *finder.hollow)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        for name, held in names.items():
            vars(importlib.import_module(name)).update(held)
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [*sys.modules]:
            if name.partition(".")[0] in packages or leaving(name):
                parent, _, last = name.rpartition(".")
                # `from parent import last` would find it there.
                vars(sys.modules.get(parent, sys.modules[name])).pop(last, None)
                del sys.modules[name]
        sys.modules.update(before)
