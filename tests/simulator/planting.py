"""Copies of a kernel file with one piece of text replaced."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SMALL = Path(__file__).parent


def planted(name: str, directory: Path, *replacements: tuple[str, str], once: bool = True) -> ModuleType:
    """Import `name`.py with replacements made. TileLang reads a kernel's source, so the copy is a file.

    A text that is there several times is replaced at its first place, or everywhere without `once`.
    """
    text = (SMALL / f"{name}.py").read_text()
    for old, new in replacements:
        assert old in text, f"{old!r} is not in {name}.py"
        text = text.replace(old, new, 1 if once else -1)
    file = directory / f"planted_{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{file.stem}_{directory.name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module
