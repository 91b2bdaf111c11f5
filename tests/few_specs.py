"""Specs that are generated fast: the repository's, with few operators."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from msa_tiles.paths import specs_dir


def copy_specs(directory: Path, operators: Collection[str]) -> Path:
    """The repository's specs of these operators, as a new directory, which is returned."""
    shutil.copytree(specs_dir(), directory)
    for name in operators:
        assert (directory / f"operators/{name}.yaml").is_file(), name
    for file in (directory / "operators").iterdir():
        if file.stem not in operators:
            file.unlink()
    return directory
