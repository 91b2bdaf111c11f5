"""Cards by the names that people use: H100, H100 PCIe, GB300."""

from __future__ import annotations

import re

from msa_tiles.spec.model import Device, Specs, Target


def card_of(name: str, specs: Specs) -> tuple[Target, Device] | None:
    """The target and the device whose name has all words of this one; None where there is none.

    Of several devices it is the one that their target has by default, or the first.
    """
    words = _words(name)
    if not words - {"nvidia"}:
        return None
    found = [
        (target, device)
        for target in specs.targets.values()
        for device in target.devices.values()
        if words <= _words(device.name)
    ]
    usual = [each for each in found if each[1].name == each[0].default_device]
    return next(iter((*usual, *found)), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
