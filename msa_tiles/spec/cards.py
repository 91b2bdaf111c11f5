"""Cards by the names that people use: H100, H100 PCIe, GB300; and which target serves one that no spec lists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Protocol

from msa_tiles.names import unknown
from msa_tiles.spec.model import Device, Specs, Target

# Compute capabilities by what names of cards hold, words of a name joined.
_FAMILIES = (
    (r"gb10", (12, 1)),
    (r"(rtx)?50\d0(ti)?|rtxpro\d000", (12, 0)),
    (r"(jetson)?thor", (11, 0)),
    (r"g?b300", (10, 3)),
    (r"g?b[12]00", (10, 0)),
    (r"h20|g?h[12]00|h800|hopper", (9, 0)),
    (r"l[24]|l[24]0s?|(rtx)?40\d0(ti)?|ada", (8, 9)),
    (r"a2|a1[06]|a10g|a40|rtxa\d000|(rtx)?30\d0(ti)?", (8, 6)),
    (r"(jetson)?orin", (8, 7)),
    (r"a[18]00|a30|ampere", (8, 0)),
    (r"t4|(rtx)?20\d0(ti)?|turing", (7, 5)),
    (r"v100|volta", (7, 0)),
)
_MOST_WORDS = 3  # that are joined: RTX PRO 6000


class _OfCapability(Protocol):
    """A target, as far as cards are concerned."""

    @property
    def capability(self) -> tuple[int, int]: ...


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


def unknown_target(what: str, name: str, targets: Mapping[str, _OfCapability]) -> str:
    """The sentence about a name that is no target: which target serves the GPU that it means, if it means one."""
    served = told_of(name, targets)
    if not served:
        return unknown(what, name, targets, alike=0.75)  # names of other makers' cards are as long, and have digits
    known = ", ".join("{} ({}.{})".format(target, *each.capability) for target, each in targets.items())
    serving = next(iter(_serving(_capability(name), targets)), None)
    remedy = f": write {what} {serving}" if serving else ""
    return f"{what} {name} is unknown; {served}{remedy}. Known: {known}"


def unknown_device(what: str, name: str, targets: Mapping[str, _OfCapability]) -> str:
    """The same about a name that is no device either, with what else names one."""
    return (
        f"{unknown_target(what, name or '(empty)', targets)}; cards such as H100, cuda, cuda:N and cpu are devices, too"
    )


def told_of(name: str, targets: Mapping[str, _OfCapability]) -> str:
    """Says which target serves the GPU that the name of a card or an architecture means; empty for other names."""
    capability = _capability(name)
    there = {of for _, of in _FAMILIES} | {each.capability for each in targets.values()}
    if capability is None or capability not in there:
        return ""
    of = "a GPU of compute capability {}.{}".format(*capability)
    serving = " and ".join(_serving(capability, targets))
    return f"{of} is served by {serving}" if serving else f"no target serves {of}, a tree of your own can have one"


def _serving(capability: tuple[int, int] | None, targets: Mapping[str, _OfCapability]) -> list[str]:
    return [target for target, each in targets.items() if each.capability == capability]


def _capability(name: str) -> tuple[int, int] | None:
    """The compute capability of a GPU, by the name of a card or an architecture, however it is spelt."""
    if found := re.fullmatch(r"(?:sm|compute|cc)?[_. ]?(\d{1,2})\.?(\d)[af]?", name.lower()):
        return int(found[1]), int(found[2])
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {
        "".join(words[first:last])
        for first, last in itertools.combinations(range(len(words) + 1), 2)
        if last - first <= _MOST_WORDS
    }
    return next((of for names, of in _FAMILIES if any(re.fullmatch(names, each) for each in joined)), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
