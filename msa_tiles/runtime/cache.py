"""The disk cache of compiled kernels.

Layout: `<root>/<cell id>/<key>-<compiler version>/{kernel.so, kernel.cubin, kernel.cu, meta.json}`, with `kernel.ptx`
in place of `kernel.cu` where the DSL generates that, and, once audited, `audit.json`. Entries are staged beside their
place and renamed into it, so a reader sees a whole entry or none, and an entry that serves is never moved. Locks spare
work, and nothing depends on them: where the file system has none, two processes compile the same kernel, and the entry
of the first stays.

`meta.json` says what the entry is and carries the sha256 of each file. An entry that does not match, is of another
machine, or could have been written by a user who is not trusted (`trust`) is treated as absent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_tiles import trust
from msa_tiles.errors import ToolError
from msa_tiles.files import can_be_made, make_directory, write_atomically

FORMAT = 2
VARIABLE = "MSA_TILES_CACHE_DIR"
LIBRARY, CUBIN, META, AUDIT = "kernel.so", "kernel.cubin", "meta.json", "audit.json"
SOURCES = {"tilelang": "kernel.cu", "cutedsl": "kernel.ptx"}  # what a DSL generates, for readers
_STAGE = ".stage-"
_ABANDONED = 3600  # seconds after which nobody compiles into a staged directory any more
_META_LIMIT = 1 << 20
_ATTEMPTS = 8  # at a place where others publish too
_FULL = (errno.ENOSPC, errno.EDQUOT)
# e_machine of the ELF header, by what `platform.machine` says.
_MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "riscv64": 243}
_log = logging.getLogger(__name__)


class CacheError(ToolError):
    """The cache cannot be written, or is not to be trusted; the message says why and what to do."""


def default_root() -> Path:
    """`MSA_TILES_CACHE_DIR`, or `~/.cache/msa_tiles` where the variable is not set or empty.

    Where there is no home directory that can be written to, a directory of this user's below the temporary one, which
    is said in a log record.

    Raises CacheError for a variable that begins with a `~` of nobody.
    """
    configured = os.environ.get(VARIABLE)
    if configured:
        path = os.path.expanduser(configured)
        if path.startswith("~"):
            raise CacheError(f"{VARIABLE} is {configured!r}, and there is no such home directory; write a whole path")
        return Path(path).absolute()
    home = Path(os.path.expanduser("~"))
    root = home / ".cache" / "msa_tiles"
    if home.is_absolute() and (root.is_dir() or can_be_made(root)):
        return root
    elsewhere = Path(tempfile.gettempdir()) / f"msa_tiles-{os.geteuid()}"
    _say_once(f"{home} cannot be written to: compiled kernels go to {elsewhere}; {VARIABLE} names another directory")
    return elsewhere


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
            found = json.loads(trust.read(self.directory / AUDIT, _META_LIMIT))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def write_audit(self, measured: Mapping[str, Any]) -> None:
        """Keep what the audit measured, where the cache can be written: a prebuilt one is measured every time."""
        with contextlib.suppress(OSError):
            write_atomically(self.directory / AUDIT, json.dumps(measured, indent=1, sort_keys=True))


class Cache:
    """The cache below one directory."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else default_root()

    def load(
        self, cell_id: str, key: str, compiler: str | None, expected: Mapping[str, Any] | None = None
    ) -> Entry | None:
        """The entry of `key`, whose meta must hold what is `expected`, or None.

        Without a compiler on this machine any version's entry will do, the latest one first: prebuilt kernels must run
        where nothing can be compiled. What is not trusted is left out, which is said in a log record.
        """
        parent = self.root / cell_id
        wanted = {"format": FORMAT, "cell": cell_id, "key": key, **(expected or {})}
        try:
            self._require_trust(parent)
            if compiler is not None:
                return _read(parent / f"{key}-{compiler}", wanted)
            found = sorted(parent.glob(f"{key}-*"), key=lambda path: _version(path.name), reverse=True)
        except trust.TrustError as error:
            _say_once(f"kernels of the cache are left out: {error}")
            return None
        except OSError:
            return None
        return next((entry for entry in (_read(path, wanted) for path in found) if entry is not None), None)

    @contextlib.contextmanager
    def lock(self, cell_id: str, key: str) -> Iterator[None]:
        """Hold the lock of one key, so that nobody else compiles the same kernel at the same time.

        Threads of this process exclude each other in any case, processes where the file system has locks.
        """
        place = self._directory(cell_id) / f".{key}.lock"
        with _thread_lock(str(place)):
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            _held.add(descriptor)
            try:
                _flock(descriptor, place)
                yield
            finally:
                _held.discard(descriptor)
                # Closing would not do: a child that was forked meanwhile has the file open, too.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    @contextlib.contextmanager
    def stage(self, cell_id: str) -> Iterator[Path]:
        """A directory on the cache's file system to compile into, removed on leaving unless it was published.

        Raises CacheError where the disk is full.
        """
        directory = self._directory(cell_id)
        staged = directory / f"{_STAGE}{secrets.token_hex(8)}"
        try:
            staged.mkdir(mode=0o755)
            _remove_abandoned(directory, staged.stat().st_mtime)
            yield staged
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise self._error(f"is on a full disk ({error.strerror})") from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def publish(self, cell_id: str, key: str, compiler: str, staged: Path, meta: Mapping[str, Any]) -> Entry:
        """Move a staged directory into its place. Where a valid entry stands there by now, that one stays.

        Raises CacheError where neither can be done.
        """
        hashes = {path.name: _sha256(path.read_bytes()) for path in sorted(staged.iterdir())}
        document = {**meta, "format": FORMAT, "cell": cell_id, "key": key, "sha256": hashes}
        (staged / META).write_text(json.dumps(document, indent=1, sort_keys=True))
        for path in staged.iterdir():  # compilers and linkers leave to others what the umask does
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
        place = self.root / cell_id / f"{key}-{compiler}"
        wanted = {name: document[name] for name in ("format", "cell", "key")}
        for _ in range(_ATTEMPTS):
            try:
                staged.rename(place)
                return Entry(place, document)
            except OSError as error:
                if not os.path.lexists(place):
                    raise self._error(f"cannot be written ({error.strerror})") from error
            # What stands there is another's, who was faster where locks do nothing, or is no entry at all.
            present = _read(place, wanted)
            if present is not None:
                return present
            _discard(place, wanted)
        raise self._error(f"has something at {place} that is no entry and cannot be moved away; remove it")

    def _require_trust(self, directory: Path) -> None:
        """Of the root, which may be reached through links, and of a directory in it."""
        trust.require(self.root, os.stat(self.root))
        trust.require(directory, os.lstat(directory))

    def _directory(self, cell_id: str) -> Path:
        """Where a cell's entries lie, made if need be.

        Raises CacheError where kernels cannot be written there, loaded from there, or trusted.
        """
        directory = self.root / cell_id
        try:
            # Whoever may write here decides what code this user runs; others may read, as of any installed code.
            make_directory(directory)
            self._require_trust(directory)
        except trust.TrustError as error:
            raise self._error(f"is not trusted: {error}") from error
        except OSError as error:
            raise self._error(f"cannot be written ({error.strerror})") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
            raise self._error(f"cannot be written ({os.strerror(errno.EROFS if read_only else errno.EACCES)})")
        if os.statvfs(directory).f_flag & os.ST_NOEXEC:
            raise self._error("is on a file system that is mounted noexec, from which no code can be loaded")
        return directory

    def _error(self, sentence: str) -> CacheError:
        return CacheError(
            f"the kernel cache {self.root} {sentence}; set {VARIABLE} to a directory of your own, which is made if it "
            "is not there"
        )


def _read(directory: Path, wanted: Mapping[str, Any]) -> Entry | None:
    """The entry of a directory, or None where it is none, not what is wanted, of another machine or not trusted."""
    try:
        trust.require(directory, os.lstat(directory))
        meta = json.loads(trust.read(directory / META, _META_LIMIT))
        if not _describes(meta, wanted):
            return None
        for name, known in meta["sha256"].items():
            content = trust.read(directory / name)
            if _sha256(content) != known or (name == LIBRARY and not _is_of_this_machine(content)):
                return None
    except trust.TrustError as error:
        _say_once(f"an entry of the kernel cache is left out: {error}")
        return None
    except (OSError, ValueError, RecursionError):
        return None
    return Entry(directory, meta)


def _describes(meta: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether a meta has the form of one, and what is wanted."""
    if not isinstance(meta, dict) or any(meta.get(name) != value for name, value in wanted.items()):
        return False
    function, kernels, hashes = (meta.get(name) for name in ("function", "kernels", "sha256"))
    if not (isinstance(function, str) and function.isidentifier()):
        return False
    if not (isinstance(kernels, dict) and isinstance(hashes, dict)):
        return False
    return {LIBRARY, CUBIN} <= hashes.keys() <= {LIBRARY, CUBIN, *SOURCES.values()}


def _is_of_this_machine(library: bytes) -> bool:
    """Whether it is an ELF library of this processor; every one is where the processor is one that we do not know."""
    machine = _MACHINES.get(platform.machine())
    return library[:6] == b"\x7fELF\x02\x01" and (
        machine is None or int.from_bytes(library[18:20], "little") == machine
    )


def _discard(place: Path, wanted: Mapping[str, Any]) -> None:
    """Move away what stands in an entry's place, unless it is a valid entry by then."""
    discarded = place.with_name(f"{_STAGE}{secrets.token_hex(8)}")
    try:
        place.rename(discarded)
        if _read(discarded, wanted) is not None:
            discarded.rename(place)
            return
    except OSError:
        return
    if discarded.is_dir() and not discarded.is_symlink():
        shutil.rmtree(discarded, ignore_errors=True)
    else:
        discarded.unlink(missing_ok=True)


def _remove_abandoned(directory: Path, now: float) -> None:
    """Remove what compilations that were killed have left behind. `now` is by the clock of the file system."""
    for path in directory.glob(f"{_STAGE}*"):
        with contextlib.suppress(OSError):
            if now - path.lstat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _flock(descriptor: int, place: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another process compiles this kernel; waiting for it (%s)", place)
    except OSError as error:
        _say_once(f"{place.parents[1]} has no locks ({error.strerror}): a kernel may be compiled more than once there")
        return
    else:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        _say_once(f"{place.parents[1]} lost a lock ({error.strerror}): a kernel may be compiled more than once there")


_thread_locks: dict[str, threading.Lock] = {}
_held: set[int] = set()  # descriptors of files that are locked


def _thread_lock(place: str) -> threading.Lock:
    return _thread_locks.setdefault(place, threading.Lock())


def _forget_locks() -> None:
    """In a child of a fork: it has one thread, and whoever held a lock of the parent's is not in it."""
    _thread_locks.clear()
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_locks)


@functools.lru_cache(maxsize=256)
def _say_once(sentence: str) -> None:
    _log.warning("%s", sentence)


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.rpartition("-")[2].split(".") if part.isdigit())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
