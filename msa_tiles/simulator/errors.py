"""What a simulation raises. Each message says where: the statement, the threads and the CTA."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """The kernel did something that is undefined on the GPU, or that the simulator does not model."""


class UnsupportedError(SimulationError):
    """An IR construct, type or shape that the simulator does not know. Nothing is ever skipped."""


class ArgumentError(SimulationError):
    """An argument that does not fit the kernel's signature."""


class OutOfBoundsError(SimulationError):
    """An access outside a buffer."""


class UninitialisedError(SimulationError):
    """A read of shared memory or of a fragment that nobody wrote."""


class DivergenceError(SimulationError):
    """Threads that must act together are apart, or a value that must be the same in them is not."""


class DeadlockError(SimulationError):
    """Every thread waits."""


class BarrierError(SimulationError):
    """More arrivals than a barrier counts."""


class RaceError(SimulationError):
    """Two accesses of shared or tensor memory that no barrier puts in order, or of what the kernel before works on."""


class ProxyFenceError(SimulationError):
    """The async proxy (TMA, wgmma) meets ordinary writes that no fence_proxy_async of their writer has published."""


class InFlightError(SimulationError):
    """A register fragment is touched while a wgmma owns it, or a CTA ends before its asynchronous work has."""
