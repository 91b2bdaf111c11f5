"""A release wheel: the pure wheel of this checkout, and a pack inside it.

The pure wheel is the build backend's. Here the pack is added, the tag becomes that of the platform, and the list of
files is written anew, as the binary distribution format asks for (packaging.python.org/specifications).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from msa_tiles import __version__, paths
from msa_tiles.pack import make
from msa_tiles.pack.make import GLIBC, MACHINE, Made, PackingError
from msa_tiles.runtime.build import Job
from msa_tiles.runtime.cache import Cache
from msa_tiles.runtime.packs import MANIFEST
from msa_tiles.runtime.registry import Target

MOST_BYTES = 60_000_000
PLACE = "msa_tiles/_packs"
_PLATFORM = "manylinux_{}_{}_{}".format(*GLIBC, MACHINE)
_TIME = (2020, 1, 1, 0, 0, 0)  # equal wheels come from equal kernels


def file_name() -> str:
    """What a release wheel of this version is called."""
    return f"msa_tiles-{__version__}-py3-none-{_PLATFORM}.whl"


def check(out: Path) -> None:
    """Raise PackingError outside a checkout, and for another name than a wheel's."""
    if not (paths.PACKAGE.parent / "pyproject.toml").is_file():
        raise PackingError("a wheel is built in a checkout; elsewhere, name a directory")
    if out.name != file_name():
        raise PackingError(f"{out.name} is no name that pip reads: call it {file_name()}")


def build(
    jobs: Iterable[Job], target: Target, out: Path, *, workers: int = 1, cache: Cache | None = None
) -> Iterator[Job]:
    """Make a pack, and the wheel around it; yields the jobs as they are done. The wheel is there after the last one.

    Raises PackingError for another name than a wheel's, outside a checkout, when a kernel cannot be packed or needs a
    newer glibc than the name says, and for a wheel of more than 60 MB.
    """
    check(out)
    return _built(jobs, target, out, workers, cache)


def _built(jobs: Iterable[Job], target: Target, out: Path, workers: int, cache: Cache | None) -> Iterator[Job]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pack = Path(scratch, target.name)
        yield from make.make(jobs, target, pack, workers=workers, cache=cache)
        made = make.described(pack)
        if tuple(map(int, made.glibc.split("."))) > GLIBC:
            raise PackingError(
                f"the pack needs glibc {made.glibc}, the wheel's name says {GLIBC[0]}.{GLIBC[1]}: use an older Linux"
            )
        staged = Path(scratch, out.name)
        _assemble(_pure(Path(scratch)), pack, staged)
        if (size := staged.stat().st_size) > MOST_BYTES:
            raise PackingError(
                f"the wheel has {size / 1e6:.1f} MB, wanted at most {MOST_BYTES / 1e6:.0f}: pack fewer points"
            )
        # The scratch directory may be on another file system.
        beside = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            beside.write_bytes(staged.read_bytes())
            beside.replace(out)
        finally:
            beside.unlink(missing_ok=True)


def described(wheel: Path) -> Made:
    """What a wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(PLACE) and name.endswith(MANIFEST)]
        manifests = [json.loads(archive.read(name)) for name in names]
    [bounds] = {tuple(manifest["tvm_ffi"]) for manifest in manifests}
    kernels = sum(len(manifest["kernels"]) for manifest in manifests)
    return Made(wheel, kernels, "{}.{}".format(*GLIBC), "apache-tvm-ffi>={},<{}".format(*bounds), wheel.stat().st_size)


def _pure(scratch: Path) -> Path:
    """The wheel that `pip install .` would build, without reaching for an index."""
    places = ["--wheel-dir", str(scratch / "pure"), str(paths.PACKAGE.parent)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--no-build-isolation", *places], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackingError(f"`pip wheel` failed (it needs pip and hatchling): {(done.stderr or done.stdout).strip()}")
    [built] = (scratch / "pure").glob("*.whl")
    return built


def _assemble(pure: Path, pack: Path, out: Path) -> None:
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    [record] = [name for name in files if name.endswith(".dist-info/RECORD")]
    tags = record.replace("RECORD", "WHEEL")
    del files[record]
    files[tags] = _tagged(files[tags].decode()).encode()
    for path in sorted(pack.iterdir()):
        files[f"{PLACE}/{pack.name}/{path.name}"] = path.read_bytes()
    rows = [(name, f"sha256={_hash(content)}", len(content)) for name, content in sorted(files.items())]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
    files[record] = text.getvalue().encode()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        # The list of files comes last, after what it lists.
        for name in [*sorted(files.keys() - {record}), record]:
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])


def _tagged(text: str) -> str:
    kept = [line for line in text.splitlines() if line and not line.startswith(("Root-Is-Purelib:", "Tag:"))]
    return "\n".join([*kept, "Root-Is-Purelib: false", f"Tag: py3-none-{_PLATFORM}", ""])


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
