from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toy import DATA, Toy


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Toy()


@pytest.fixture
def package(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Makes a package directory that holds these files."""

    def make(files: dict[str, str]) -> Path:
        root = tmp_path / "msa_tiles"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    return make
