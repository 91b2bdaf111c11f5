"""Do the shipped kernels follow from the shipped specs?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path


def differences(shipped: Path, generate: Callable[[Path], object]) -> tuple[int, list[str]]:
    """Generate everything into a temporary folder with `generate(folder)` and compare it with `shipped`, byte by byte.

    Returns the number of kernel files generated, and a sentence for each file that differs, is missing or left over.
    """
    with tempfile.TemporaryDirectory(prefix="msa_tiles_demo_") as folder:
        fresh = Path(folder)
        generate(fresh)
        made = {file.relative_to(fresh): file.read_bytes() for file in _files(fresh)}
    there = {file.relative_to(shipped): file.read_bytes() for file in _files(shipped)} if shipped.is_dir() else {}
    sentences = []
    for name in sorted(made.keys() | there.keys()):
        if name not in there:
            sentences.append(f"{name} follows from the specs but is not shipped")
        elif name not in made:
            sentences.append(f"{name} is shipped but does not follow from the specs")
        elif made[name] != there[name]:
            sentences.append(f"{name} differs from what the specs generate")
    return sum(name.suffix == ".py" for name in made), sentences


def _files(root: Path) -> list[Path]:
    """What the generator writes: kernels and the index. Evidence (`verified.json`) comes from running."""
    files = [file for file in root.rglob("*.py") if "__pycache__" not in file.parts]
    return files + [file for file in [root / "index.json"] if file.is_file()]
