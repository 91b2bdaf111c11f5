"""What a shared library asks of others, and the names it asks by. 64-bit little-endian ELF with section headers."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from msa_tiles.errors import ToolError

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_NEEDED_VERSION = struct.Struct("<HHIII")
_VERSION = struct.Struct("<IHHII")
_SYMBOLS, _DYNAMIC_SECTION, _VERSIONS, _SYMBOL_VERSIONS = 11, 6, 0x6FFFFFFE, 0x6FFFFFFF  # kinds of sections
_NEEDED, _SONAME, _RPATH, _RUNPATH = 1, 14, 15, 29  # entries of the dynamic section that are names
_UNDEFINED = 0
_UNVERSIONED = 1
_WEAK = 2


class ElfError(ToolError):
    """A file is not a shared library as the DSLs make them."""


class Library:
    """One shared library, read from its bytes."""

    def __init__(self, image: bytes, name: str) -> None:
        self.image = image
        self.name = name
        if image[:6] != b"\x7fELF\x02\x01" or len(image) < 64:
            raise ElfError(f"{name} is not a 64-bit little-endian ELF file")
        try:
            offset, count = struct.unpack_from("<Q", image, 40)[0], struct.unpack_from("<H", image, 60)[0]
            self._sections = [_SECTION.unpack_from(image, offset + 64 * i) for i in range(count)]
            [symbols] = [section for section in self._sections if section[1] == _SYMBOLS]
            self._names = self._sections[symbols[6]][4]  # where the text of names begins
            self._symbols = [
                _SYMBOL.unpack_from(image, at) for at in range(symbols[4], symbols[4] + symbols[5], _SYMBOL.size)
            ]
        except (struct.error, ValueError, IndexError) as error:
            raise ElfError(f"{name} has no table of dynamic symbols: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Library:
        return cls(path.read_bytes(), path.name)

    def asked(self) -> set[str]:
        """Names that it expects from whatever is loaded before it, not from a library that it names itself.

        Those of libc have a version; weak ones may be missing.
        """
        versions = self._versions_of_symbols()
        return {
            self._text(name)
            for (name, info, _, section, *_), version in zip(self._symbols, versions, strict=True)
            if name and _is_asked(info, section) and version <= _UNVERSIONED
        }

    def address(self, name: str) -> int:
        """Offset in the file of a symbol that the library defines in read-only data."""
        for start, _, _, section, value, _ in self._symbols:
            if section != _UNDEFINED and self._text(start) == name:
                _, _, _, place, offset, *_ = self._sections[section]
                return value - place + offset
        raise ElfError(f"{self.name} has no symbol {name}")

    def needed(self) -> set[str]:
        """Libraries that it names itself."""
        return {self._text(value) for tag, value in self._dynamic() if tag == _NEEDED}

    def libc(self) -> tuple[int, int]:
        """The oldest glibc that has everything it asks glibc for, such as (2, 14)."""
        versions = [(2, 0)]
        for name in self._versions():
            if found := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", name):
                versions.append((int(found[1]), int(found[2])))
        return max(versions)

    def renamed(self, names: Mapping[str, str]) -> bytes:
        """The library with names that it asks for replaced by others of the same length.

        Raises ElfError where the text of a name also serves another purpose.
        """
        image = bytearray(self.image)
        starts = {name: self._text(name) for name, info, _, section, *_ in self._symbols if _is_asked(info, section)}
        others = [start for start, _, _, section, *_ in self._symbols if section != _UNDEFINED]
        others += [value for tag, value in self._dynamic() if tag in (_NEEDED, _SONAME, _RPATH, _RUNPATH)]
        used = [*starts, *others]
        for start, text in starts.items():
            new = names.get(text)
            if new is None:
                continue
            if len(new) != len(text):
                raise ValueError(f"{new!r} has {len(new)} letters, wanted {len(text)} as in {text!r}")
            if any(start < other <= start + len(text) for other in used) or start in others:
                raise ElfError(f"{self.name} shares the text of {text!r} with another name")
            at = self._names + start
            image[at : at + len(new)] = new.encode()
        return bytes(image)

    def _text(self, start: int) -> str:
        begin = self._names + start
        return self.image[begin : self.image.index(b"\0", begin)].decode()

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        for section in self._sections:
            if section[1] == _DYNAMIC_SECTION:
                yield from _DYNAMIC.iter_unpack(self.image[section[4] : section[4] + section[5]])

    def _versions_of_symbols(self) -> list[int]:
        for section in self._sections:
            if section[1] == _SYMBOL_VERSIONS:
                return [
                    value for (value,) in struct.iter_unpack("<H", self.image[section[4] : section[4] + section[5]])
                ]
        return [_UNVERSIONED] * len(self._symbols)

    def _versions(self) -> Iterator[str]:
        for section in self._sections:
            if section[1] != _VERSIONS:
                continue
            at = section[4]
            for _ in range(section[7]):
                _, count, _, first, following = _NEEDED_VERSION.unpack_from(self.image, at)
                entry = at + first
                for _ in range(count):
                    _, _, _, name, step = _VERSION.unpack_from(self.image, entry)
                    yield self._text(name)
                    entry += step
                at += following


def _is_asked(info: int, section: int) -> bool:
    return section == _UNDEFINED and info >> 4 != _WEAK
