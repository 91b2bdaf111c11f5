"""What the card says of itself while it works: clock and power, read from the driver's management library."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1  # NVML_CLOCK_SM


@dataclass(frozen=True)
class Condition:
    """Clock of the multiprocessors in MHz and power in watts, at one moment."""

    clock_mhz: int
    watts: float


class Sensors:
    """The sensors of one CUDA device. Where the driver's library is missing or refuses, there is nothing to read."""

    def __init__(self, device: torch.device) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        if self._library is None:
            return
        # CUDA_VISIBLE_DEVICES renumbers devices for CUDA and not for the driver; the UUID is the same for both.
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        name = f"GPU-{uuid}".encode()
        if uuid is None or self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) != 0:
            self._library = None

    def read(self) -> Condition | None:
        """The condition now; None where it cannot be read."""
        if self._library is None:
            return None
        clock, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        if self._library.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(clock)) != 0:
            return None
        if self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(milliwatts)) != 0:
            return None
        return Condition(clock.value, milliwatts.value / 1e3)


def driver_version() -> str | None:
    """The driver's version; None where it cannot be read."""
    library = _library()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return None
    return text.value.decode()


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
