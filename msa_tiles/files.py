"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

UNFINISHED = ".writing-"  # what the name of a file begins with that is not whole yet


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file at once: a reader sees the old text or the new one, whatever happens meanwhile.

    A symbolic link in its place is replaced, not followed. `mode` is what the umask leaves of it.

    Raises OSError that names the file.
    """
    staged = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    try:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(staged, path)
    except OSError as error:
        # A write that fails names no file, and nobody knows the staged one.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


def make_directory(path: Path) -> None:
    """Make a directory, and those that it lies in, to which nobody else can write, whatever the umask says."""
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    for each in reversed(missing):
        each.mkdir(mode=0o755, exist_ok=True)


def can_be_made(path: Path) -> bool:
    """Whether this user can make a directory at a path, or write to the one that is there."""
    existing = next((each for each in (path, *path.parents) if os.path.lexists(each)), None)
    return path.is_absolute() and existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
