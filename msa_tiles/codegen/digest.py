"""The digest of a kernel: its code, the device helpers it imports, and the toolchain that compiles it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from msa_tiles.codegen.toolchain import PINS

PACKAGE = Path(__file__).resolve().parent.parent
_HELPERS = "msa_tiles.dsl"
_HEADER_DIGEST = re.compile(r"^# cell: .* digest: ([0-9a-f]{16})$", re.MULTILINE)


def digest_of(text: str, dsl: str, package: Path = PACKAGE) -> str:
    """Digest of a kernel file or of its body. The comments above the module docstring compile to nothing: no part."""
    body = without_header(text)
    state = hashlib.sha256()
    for part in (body, *_helper_sources(body, package), json.dumps(PINS[dsl], sort_keys=True)):
        state.update(hashlib.sha256(part.encode()).digest())
    return state.hexdigest()[:16]


def header_of(text: str) -> str:
    """The comment lines (and the blank line) above the module docstring."""
    lines = text.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("#") and line.strip()), len(lines))
    return "".join(lines[:count])


def without_header(text: str) -> str:
    return text[len(header_of(text)) :]


def recorded_digest(text: str) -> str | None:
    """The digest that a generated file states in its header."""
    match = _HEADER_DIGEST.search(header_of(text))
    return match[1] if match else None


def _helper_sources(body: str, package: Path) -> list[str]:
    """Sources of the helper modules that the body imports, directly or not, ordered by name."""
    found: dict[str, str] = {}
    pending = list(_imported_helpers(body, package, _HELPERS))
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = _module_file(name, package).read_text(encoding="utf-8")  # type: ignore[union-attr]
        pending += _imported_helpers(found[name], package, name)
    return [name + "\n" + found[name] for name in sorted(found)]


def _imported_helpers(source: str, package: Path, importer: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = importer.split(".")
                is_package = (_module_file(importer, package) or package).name == "__init__.py"
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            # Importing a.b.c runs a and a.b too; only what lies below the helpers' package counts.
            for end in range(2, len(parts) + 1):
                prefix = ".".join(parts[:end])
                if f"{prefix}.".startswith(f"{_HELPERS}.") and _module_file(prefix, package):
                    yield prefix


def _module_file(name: str, package: Path) -> Path | None:
    base = package.joinpath(*name.split(".")[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None
