"""The toolchain versions that decide what a kernel compiles to; pyproject.toml pins the same ones."""

from __future__ import annotations

PINS: dict[str, dict[str, str]] = {
    "tilelang": {"tilelang": "0.1.15"},
    "cutedsl": {"nvidia-cutlass-dsl": "4.8.1"},
}
