"""What a call and a device are, as far as choosing a kernel is concerned."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from msa_tiles import readable
from msa_tiles.runtime.registry import Target, default_registry
from msa_tiles.scoped import held
from msa_tiles.spec.cards import card_of, unknown_device


@dataclass(frozen=True)
class DeviceFacts:
    """One device as dispatch sees it."""

    name: str  # product name, or what the user asked `explain` about
    target: str | None  # the target that covers it; None when none does
    sm_count: int
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        kind = self.target or ("sm{}{}".format(*self.capability) if self.capability else "no GPU")
        return f"{self.name} ({kind})"


@dataclass(frozen=True)
class CallFacts:
    """One call, reduced to what decides which kernel serves it.

    `precision` says how its tensors are stored; which of the precisions that are stored alike has the kernel that runs
    is decided by measurement.

    `variant` holds the call's value for every compile-time dim of the operator. `features` names what the call needs
    beyond flat tensors (`paged`, `q_positions`). `refusals` are reasons for which no kernel at all can serve it. `size`
    is the bucket of its number of queries (see `msa_tiles.runtime.tuned`), 0 when nobody said. `widened` tells that its
    queries came in a narrower format than that of `precision`.
    """

    op: str
    device: torch.device
    precision: str
    variant: Mapping[str, int]
    features: frozenset[str] = field(default_factory=frozenset)
    refusals: tuple[str, ...] = ()
    size: int = 0
    widened: bool = False


_stood_for: contextvars.ContextVar[DeviceFacts | None] = contextvars.ContextVar("device stood for", default=None)


def standing_for(facts: DeviceFacts) -> AbstractContextManager[None]:
    """All devices are taken for this one, whether there is one or not: for whoever asks what a call would do."""
    return held(_stood_for, facts)


def stands_for_another() -> bool:
    """Whether devices are taken for one that need not be there."""
    return _stood_for.get() is not None


def device_facts(device: torch.device, targets: Iterable[Target]) -> DeviceFacts:
    """Facts of a torch device; asking a CUDA device initialises CUDA but does not synchronise."""
    if (stood_for := _stood_for.get()) is not None:
        return stood_for
    if device.type != "cuda":
        return DeviceFacts(str(device), None, 0, None)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    covering = (target.name for target in targets if target.capability == capability)
    return DeviceFacts(properties.name, next(covering, None), properties.multi_processor_count, capability)


def multiprocessors(device: torch.device | int | None) -> int:
    """How many a CUDA device has."""
    if (stood_for := _stood_for.get()) is not None:
        return stood_for.sm_count
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device: torch.device) -> tuple[int, int]:
    """That of a CUDA device."""
    if (stood_for := _stood_for.get()) is not None and stood_for.capability is not None:
        return stood_for.capability
    return torch.cuda.get_device_capability(device)


def card_facts(name: str) -> DeviceFacts | None:
    """Facts of the card of this name, such as H100, as the specs list it; None where they list none of it."""
    found = card_of(name, readable.specs())
    if found is None:
        return None
    target, device = found
    return DeviceFacts(device.name, target.name, device.sm_count, target.capability)


def target_facts(target: Target) -> DeviceFacts:
    """Facts of a GPU family's usual product, for questions asked without that GPU."""
    return DeviceFacts(target.default_device, target.name, target.sm_count, target.capability)


def facts_of(device: str | torch.device) -> tuple[torch.device, DeviceFacts]:
    """What somebody names a device by, and its facts: a target, a card, or what torch calls it.

    Raises ValueError for a name that means none, and for a device that is not here.
    """
    targets = default_registry().targets
    if str(device) in targets:
        return torch.device("cuda", 0), target_facts(targets[str(device)])
    try:
        place = torch.device(device)
    except RuntimeError:
        if (card := card_facts(str(device))) is not None:
            return torch.device("cuda", 0), card
        raise ValueError(unknown_device("device", str(device), targets)) from None
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", 0)
    try:
        return place, device_facts(place, targets.values())
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device} is not here ({error}); a target needs none: {', '.join(targets)}") from error
