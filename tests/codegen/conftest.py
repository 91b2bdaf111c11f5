from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from msa_tiles.codegen import Generated, produce
from msa_tiles.spec import load

DATA = Path(__file__).parent / "data"


class Toy:
    """A copy of the toy specs and their skeleton, in the working directory."""

    specs = Path("specs")
    skeletons = Path("skeletons")
    operator = specs / "operators" / "scale.yaml"
    skeleton = skeletons / "tilelang" / "simt" / "scale.py"

    def produce(self) -> Generated:
        return produce(load(self.specs), self.skeletons)

    def text(self) -> str:
        """The one generated kernel."""
        return self.produce().files["tilelang/toy/scale_bf16.py"]

    def edit(self, path: Path, old: str, new: str) -> int:
        """Replace text that stands in the file; returns the first line that changes."""
        text = path.read_text()
        assert old in text, f"{path} does not hold {old!r}"
        path.write_text(text.replace(old, new, 1))
        return text[: text.index(old)].count("\n") + 1


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
