"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

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


def refuse_unwritable(option: str, path: Path, *, directory: bool) -> None:
    """Raise ValueError unless a file, or a directory to write files in, can be made at a path. Leaves nothing there.

    `option` is what named the path. It is tried out: what a file system answers about rights need not be true.
    """
    place = path.absolute()
    existing = next(each for each in (place, *place.parents) if os.path.lexists(each))
    try:
        if not directory and existing == place:
            if place.is_dir():
                raise ValueError(f"{option} {path} is a directory, wanted a file: name one in it")
            with place.open("ab"):
                pass
        else:
            # A parent that is a file is refused by the system, in words that every user knows.
            with tempfile.TemporaryFile(dir=existing):
                pass
    except OSError as error:
        what = "written to" if existing == place else f"made in {existing}"
        raise ValueError(f"{option} {path} cannot be {what} ({error.strerror}); name another place") from error


def can_be_made(path: Path) -> bool:
    """Whether this user can make a directory at a path, or write to the one that is there."""
    existing = next((each for each in (path, *path.parents) if os.path.lexists(each)), None)
    return path.is_absolute() and existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


@functools.lru_cache(maxsize=4)
def from_json(text: str) -> Any:
    """What a JSON text says, for all who read one again and again: not to be changed. Raises what `json.loads` does."""
    return json.loads(text)
