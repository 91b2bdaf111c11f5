"""The disk cache of compiled kernels.

Layout: `<root>/<cell id>/<key>-<compiler version>/{kernel.so, kernel.cubin, kernel.cu, meta.json}`, with `kernel.ptx`
in place of `kernel.cu` where the DSL generates that, and, once audited, `audit.json`. Entries are staged beside their
place and renamed into it, so a reader sees a whole entry or none. `meta.json` carries the sha256 of each file: an entry
that does not match is treated as absent and replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
LIBRARY, CUBIN, META, AUDIT = "kernel.so", "kernel.cubin", "meta.json", "audit.json"
SOURCES = {"tilelang": "kernel.cu", "cutedsl": "kernel.ptx"}  # what a DSL generates, for readers


def default_root() -> Path:
    """`MSA_TILES_CACHE_DIR`, or `~/.cache/msa_tiles`."""
    configured = os.environ.get("MSA_TILES_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "msa_tiles"


@dataclass(frozen=True)
class Entry:
    """One compiled kernel on disk."""

    directory: Path
    meta: Mapping[str, Any]

    @property
    def library(self) -> Path:
        """Shared library with the host launcher and the embedded cubin."""
        return self.directory / LIBRARY

    @property
    def cubin(self) -> Path:
        """The device code alone, for the audit."""
        return self.directory / CUBIN

    def read_audit(self) -> dict[str, Any] | None:
        """What the audit measured, or None when this entry has not been audited."""
        try:
            found = json.loads((self.directory / AUDIT).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_audit(self, measured: Mapping[str, Any]) -> None:
        """Keep what the audit measured."""
        write_atomically(self.directory / AUDIT, json.dumps(measured, indent=1, sort_keys=True))


class Cache:
    """The cache below one directory."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else default_root()

    def load(self, cell_id: str, key: str, compiler: str | None) -> Entry | None:
        """The entry of `key`, or None.

        Without a compiler on this machine any version's entry will do, the latest one first: prebuilt kernels must run
        where nothing can be compiled.
        """
        parent = self.root / cell_id
        if compiler is not None:
            return _read(parent / f"{key}-{compiler}")
        found = sorted(parent.glob(f"{key}-*"), key=lambda path: _version(path.name), reverse=True)
        return next((entry for entry in map(_read, found) if entry is not None), None)

    @contextlib.contextmanager
    def lock(self, cell_id: str, key: str) -> Iterator[None]:
        """Hold the lock of one key across processes, so that two of them never compile the same kernel."""
        directory = self._directory(cell_id)
        descriptor = os.open(directory / f".{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def stage(self, cell_id: str) -> Iterator[Path]:
        """A private directory on the cache's file system, removed on leaving unless it was published."""
        staged = Path(tempfile.mkdtemp(prefix=".stage-", dir=self._directory(cell_id)))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def publish(self, cell_id: str, key: str, compiler: str, staged: Path, meta: Mapping[str, Any]) -> Entry:
        """Move a staged directory into its place. The caller holds the key's lock."""
        hashes = {path.name: _sha256(path) for path in sorted(staged.iterdir())}
        document = {**meta, "format": FORMAT, "sha256": hashes}
        (staged / META).write_text(json.dumps(document, indent=1, sort_keys=True))
        place = self.root / cell_id / f"{key}-{compiler}"
        if place.exists():
            # Only a corrupt entry can stand here; rename it away first, for a directory cannot be replaced in one step.
            discarded = staged.with_name(staged.name + "-old")
            place.rename(discarded)
            shutil.rmtree(discarded, ignore_errors=True)
        staged.rename(place)
        return Entry(place, document)

    def _directory(self, cell_id: str) -> Path:
        directory = self.root / cell_id
        try:
            # 0700: whoever may write here decides what code this user runs.
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"the kernel cache {directory} cannot be created ({error.strerror}); "
                "set MSA_TILES_CACHE_DIR to a writable directory"
            ) from error
        return directory


def _read(directory: Path) -> Entry | None:
    try:
        meta = json.loads((directory / META).read_text())
        hashes = {LIBRARY: None, CUBIN: None, **meta["sha256"]}
        if meta["format"] != FORMAT or any(_sha256(directory / name) != known for name, known in hashes.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(directory, meta)


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.rpartition("-")[2].split(".") if part.isdigit())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file at once: a reader sees the old text or the new one, whatever happens meanwhile."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(name, mode)
    os.replace(name, path)
