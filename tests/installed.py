"""Which distributions this environment has."""

from __future__ import annotations

import importlib.metadata


def first_missing(*names: str) -> str | None:
    """The first distribution that is not installed, or None.

    Nothing is looked for among modules: to look for pip there has the hook of setuptools leave distutils to the
    standard library, and setuptools, which torch's inductor imports, then fails for the rest of the process.
    """
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return name
    return None
