"""The CUDA module inside a library that TileLang compiled, as TVM wrote it: how its kernel is called, and where it is.

Numbers are little-endian; a text or a list begins with its length in 8 bytes. The blob is its length, the tree of
imports as two lists of numbers, and a kind for each module, with its bytes unless it stands for the library itself. A
CUDA module is a format, its functions by name (parameters with their DLPack types, tags of the launch, marks of tensor
maps) and the device code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from msa_tiles.errors import ToolError

# Kinds of parameters as msa_tiles/pack/runtime.c knows them, by DLPack's type code and bits. TVM has a code of its own
# for what is handed over as a pointer and becomes a parameter by value, such as a tensor map.
_PARAMETERS = {(0, 64): "l", (3, 64): "l", (2, 64): "l", (0, 32): "i", (1, 32): "i", (2, 32): "f", (30, 64): "m"}
_TENSOR_MAP = 1
_LAUNCH = {
    "blockIdx.x": "x",
    "blockIdx.y": "y",
    "blockIdx.z": "z",
    "threadIdx.x": "X",
    "threadIdx.y": "Y",
    "threadIdx.z": "Z",
    "tirx.use_dyn_shared_memory": "s",
    "tirx.use_programtic_dependent_launch": "p",
}


class EmbeddedError(ToolError):
    """A library's CUDA module is not what this version of the project knows."""


@dataclass(frozen=True)
class Embedded:
    """One device function: its name, its parameters and launch in the letters of the runtime, and its cubin."""

    name: str
    parameters: str
    launch: str
    offset: int  # of the cubin, from where the blob begins
    size: int


class _Reader:
    def __init__(self, blob: bytes, at: int, end: int) -> None:
        self.blob, self.at, self.end = blob, at, end

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise EmbeddedError("the embedded CUDA module ends early")
        self.at += count
        return self.blob[self.at - count : self.at]

    def number(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def numbers(self) -> list[int]:
        return [self.number() for _ in range(self.number())]

    def text(self) -> str:
        return self.take(self.number()).decode()


def read(blob: bytes, at: int) -> Embedded:
    """The device function of the blob that begins at an offset of a library.

    Raises EmbeddedError when it is laid out otherwise, holds several functions, or launches in a way that packs do not
    know.
    """
    [size] = struct.unpack_from("<Q", blob, at)
    reader = _Reader(blob, at + 8, min(at + 8 + size, len(blob)))
    reader.numbers(), reader.numbers()
    cuda = None
    while reader.at < reader.end:
        kind = reader.text()
        if kind == "_lib":
            continue
        length = reader.number()
        if kind != "cuda" or cuda is not None:
            raise EmbeddedError(f"a library embeds a module of kind {kind!r}, wanted one of kind 'cuda'")
        cuda = _Reader(blob, reader.at, reader.at + length)
        reader.take(length)
    if cuda is None:
        raise EmbeddedError("a library embeds no CUDA module")
    return _cuda(cuda, at)


def _cuda(reader: _Reader, begin: int) -> Embedded:
    if (form := reader.text()) != "cubin":
        raise EmbeddedError(f"a CUDA module is stored as {form!r}, wanted 'cubin'")
    if (count := reader.number()) != 1:
        raise EmbeddedError(f"a CUDA module has {count} functions, wanted one")
    name, again = reader.text(), reader.text()
    if name != again:
        raise EmbeddedError(f"a CUDA module names its function both {name!r} and {again!r}")
    types = [struct.unpack("<BBH", reader.take(4)) for _ in range(reader.number())]
    tags = [reader.text() for _ in range(reader.number())]
    marks = [struct.unpack("<i", reader.take(4))[0] for _ in range(reader.number())]
    size = reader.number()
    offset = reader.at - begin
    if reader.take(size)[:4] != b"\x7fELF" or reader.at != reader.end:
        raise EmbeddedError("a CUDA module's device code is no cubin")
    return Embedded(name, _parameters(types, marks), _launch(tags), offset, size)


def _parameters(types: list[tuple[int, int, int]], marks: list[int]) -> str:
    letters = []
    for i, (code, bits, lanes) in enumerate(types):
        if i < len(marks) and marks[i] == _TENSOR_MAP:
            letters.append("m")
        elif lanes == 1 and (code, bits) in _PARAMETERS:
            letters.append(_PARAMETERS[code, bits])
        else:
            raise EmbeddedError(f"a device function has a parameter of DLPack type {(code, bits, lanes)}")
    return "".join(letters)


def _launch(tags: list[str]) -> str:
    unknown = [tag for tag in tags if tag not in _LAUNCH]
    if unknown:
        raise EmbeddedError(f"a device function is launched with {unknown[0]!r}, which packs do not know")
    return "".join(_LAUNCH[tag] for tag in tags)
