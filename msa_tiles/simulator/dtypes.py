"""TileLang's element types in numpy, and what uninitialised memory holds."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from msa_tiles.simulator.errors import UnsupportedError

_BY_NAME: dict[str, Any] = {
    "bool": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON_BYTE = 0xA5


def numpy_type(name: object) -> np.dtype[Any]:
    """The numpy type of a scalar TIR type."""
    try:
        return np.dtype(_BY_NAME[str(name)])
    except KeyError:
        raise UnsupportedError(f"type {name} is not simulated") from None


def vector_type(name: object) -> tuple[np.dtype[Any], int]:
    """Element type and lanes of a TIR type: `uint32x4` -> (uint32, 4)."""
    match = re.fullmatch(r"(\w+?)(?:x(\d+))?", str(name))
    if match is None:
        raise UnsupportedError(f"type {name} is not simulated")
    return numpy_type(match.group(1)), int(match.group(2) or 1)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a type has NaN; bfloat16 and e4m3 are of numpy's kind V."""
    return dtype.kind not in "iub"


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that no correct kernel reads: NaN, or a wild integer."""
    if is_float(dtype):
        return np.full(shape, np.nan, dtype)
    whole = np.empty(shape, dtype)
    whole.reshape(-1).view(np.uint8)[:] = 1 if dtype == np.bool_ else POISON_BYTE
    return whole


def bits(values: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers, so that NaN equals itself."""
    return values.view(_BITS[values.dtype.itemsize])


def scalar(value: Any) -> Any:
    """A numpy scalar as the interpreter wants it: a Python int or bool, or a numpy float of its own precision."""
    return value.item() if value.dtype.kind in "iub" else value


def wrapped(value: int, dtype: np.dtype[Any]) -> int:
    """An integer reduced to a type's range, as the hardware does."""
    width = 8 * dtype.itemsize
    value &= (1 << width) - 1
    return value - (1 << width) if dtype.kind == "i" and value >> (width - 1) else value


def converted(value: Any, dtype: np.dtype[Any]) -> Any:
    """A C cast of a scalar or of an array."""
    if isinstance(value, np.ndarray):
        return value if value.dtype == dtype else value.astype(dtype)
    if dtype == np.bool_:
        return bool(value)
    if dtype.kind in "iu":
        return wrapped(int(value), dtype)
    return dtype.type(value)
