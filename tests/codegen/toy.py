"""A tiny operator with its own target and skeleton, so that the generator is tested apart from the real kernels."""

from __future__ import annotations

from pathlib import Path

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
