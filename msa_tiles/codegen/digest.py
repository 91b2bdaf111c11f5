"""The digest of a kernel: its code, the device helpers it imports, and the toolchain that compiles it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from msa_tiles.codegen.toolchain import PINS
from msa_tiles.sources import PACKAGE, code_of, header_of

_HEADER_DIGEST = re.compile(r"^# cell: (\S+) +digest: ([0-9a-f]{16})$", re.MULTILINE)


def digest_of(text: str, dsl: str, package: Path = PACKAGE) -> str:
    """Digest of a kernel file or of its body."""
    state = hashlib.sha256()
    for part in (*code_of(text, package), json.dumps(PINS[dsl], sort_keys=True)):
        state.update(hashlib.sha256(part.encode()).digest())
    return state.hexdigest()[:16]


def recorded_digests(text: str) -> dict[str, str]:
    """The digests that a generated file states in its header, by cell."""
    return dict(_HEADER_DIGEST.findall(header_of(text)))
