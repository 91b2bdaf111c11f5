"""Whose files this process runs code from: compiled kernels are code, and whoever can write them decides what runs.

Trusted are files and directories of this user and of root that nobody else may write to, and those of the users that
`MSA_TILES_CACHE_TRUST` names by their numbers, such as `1000,1001`: the one that a prebuilt cache was made by.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

VARIABLE = "MSA_TILES_CACHE_TRUST"
_ROOT = 0
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class TrustError(ValueError):
    """A file that code would be loaded from is not trusted; the message says why."""


class WritableError(TrustError):
    """It is not trusted because others may write to it."""


def trusted_users() -> frozenset[int]:
    """Numbers of the users whose files are trusted. Raises ValueError for a variable that holds no numbers."""
    named = os.environ.get(VARIABLE, "").replace(",", " ").split()
    if not all(name.isascii() and name.isdigit() for name in named):
        raise ValueError(f"{VARIABLE} is {os.environ[VARIABLE]!r}, wanted numbers of users, such as 1000,1001")
    return frozenset({_ROOT, os.geteuid(), *map(int, named)})


def require(path: Path | str, status: os.stat_result) -> None:
    """Raise TrustError where code may not be loaded from a path with this status, that of the path itself (`lstat`)."""
    if stat.S_ISLNK(status.st_mode):
        raise TrustError(f"{path} is a symbolic link")
    if status.st_uid not in trusted_users():
        raise TrustError(
            f"{path} belongs to user {status.st_uid}, neither to this one ({os.geteuid()}) nor to root; "
            f"{VARIABLE}={status.st_uid} trusts that user"
        )
    if status.st_mode & _OTHERS:
        raise WritableError(f"{path} may be written to by others (mode {stat.S_IMODE(status.st_mode):o})")


def read(path: Path, limit: int | None = None) -> bytes:
    """The bytes of a trusted file of at most `limit` bytes, read from the file whose status was looked at.

    Raises OSError, and TrustError for a file that is not trusted, no regular one, or too long.
    """
    # A pipe in its place must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        require(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise TrustError(f"{path} is no regular file")
        if limit is not None and status.st_size > limit:
            raise TrustError(f"{path} has {status.st_size} bytes, wanted at most {limit}")
        return file.read()
