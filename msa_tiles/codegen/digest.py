"""The digest of a kernel: its code, that of the device helpers it imports, and what compiles it for which GPU.

Of code counts the syntax tree without comments and docstrings: a wrong sentence can be mended without losing evidence.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from msa_tiles.codegen.toolchain import PINS
from msa_tiles.sources import PACKAGE, code_of, header_of

_HEADER_DIGEST = re.compile(r"^# cell: (\S+) +digest: ([0-9a-f]{16})$", re.MULTILINE)


def digest_of(text: str, dsl: str, arch: str, package: Path = PACKAGE) -> str:
    """Digest of a kernel file or of its body, compiled for `arch`.

    Whatever else of a target reaches code generation stands in the text.
    """
    state = hashlib.sha256()
    compiler = json.dumps({"arch": arch, **PINS[dsl]}, sort_keys=True)
    for part in (*code_of(text, package), hashlib.sha256(compiler.encode()).digest()):
        state.update(part)
    return state.hexdigest()[:16]


def recorded_digests(text: str) -> dict[str, str]:
    """The digests that a generated file states in its header, by cell."""
    return dict(_HEADER_DIGEST.findall(header_of(text)))
