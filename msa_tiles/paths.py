"""Where the specs and the generated kernels lie: inside the package in a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def specs_dir() -> Path:
    """Directory of the YAML specs that belong to this installation."""
    return _installed_or_checkout("_specs", "specs")


def generated_dir() -> Path:
    """Directory of the generated kernels and their index."""
    return _installed_or_checkout("_generated", "generated")


def _installed_or_checkout(installed: str, checkout: str) -> Path:
    inside = PACKAGE / installed
    return inside if inside.is_dir() else PACKAGE.parent / checkout
