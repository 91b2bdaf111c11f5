"""Which accesses of shared memory are in order: vector clocks of a CTA.

Agents are the warps; teams, a set of warps that did something together without telling which warp did which element (a
parallel loop over shared memory, a tile copy); the slots of the mbarriers, for the TMA loads that complete on them; and
the tensor core. Every agent has a clock that ticks when it releases something. ``knows[warp, agent]`` is the last tick
of an agent that a warp has acquired, through a barrier. An access is in order when its agent knows the tick of the
access before it. What a team did is known once all its warps have released it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from msa_tiles.simulator.errors import UnsupportedError

MOST_TEAMS = 16


class Order:
    """The clocks of one CTA."""

    def __init__(self, warps: int, slots: int) -> None:
        self.warps = warps
        self.readers = warps + MOST_TEAMS  # agents that read: warps and teams come first
        self.tensor = self.readers + slots  # the tensor core, whose clock counts products
        self.agents = self.tensor + 1
        self.clock = np.ones(self.agents, np.int32)
        self.knows = np.zeros((warps, self.agents), np.int32)
        own = np.arange(warps)
        self.knows[own, own] = 1
        # Up to which tick of their warp the lanes of a warp know of each other, through sync_warp or a barrier.
        self.met = np.zeros(warps, np.int32)
        self._teams: dict[tuple[int, ...], int] = {}
        self._members: dict[int, np.ndarray] = {}

    def slot(self, number: int) -> int:
        """The agent of an mbarrier slot."""
        return self.readers + number

    def team(self, warps: np.ndarray) -> int:
        """The agent of these warps together; a single warp is its own agent."""
        if len(warps) == 1:
            return int(warps[0])
        key = tuple(warps.tolist())
        if key not in self._teams:
            if len(self._teams) == MOST_TEAMS:
                raise UnsupportedError(f"more than {MOST_TEAMS} sets of warps act together")
            self._teams[key] = self.warps + len(self._teams)
            self._members[self._teams[key]] = warps
        return self._teams[key]

    def members(self, agent: int) -> list[int]:
        """The warps of an agent."""
        return [agent] if agent < self.warps else self._members[agent].tolist()

    def knowledge(self, agents: Any) -> np.ndarray:
        """What agents know: [agents] of one agent, [n, agents] of an array of warps."""
        if isinstance(agents, int) and agents >= self.warps:
            # Nobody knows which of its warps touches which element, so all must know.
            return self.knows[self._members[agents]].min(0)
        return self.knows[agents]

    def begin(self, agent: int) -> None:
        """A team starts a statement of its own: its earlier ones are older."""
        if agent >= self.warps:
            self.clock[agent] += 1

    def release(self, warps: np.ndarray) -> np.ndarray:
        """What these warps publish now: everything they know and did; then their clocks tick."""
        published = self.knows[warps].max(0)
        there = set(warps.tolist())
        for agent, members in self._members.items():
            if there.issuperset(members.tolist()):
                published[agent] = self.clock[agent]
                self.clock[agent] += 1
        self._tick(warps)
        return published

    def meet(self, warps: np.ndarray) -> None:
        """sync_warp: the lanes of each warp learn of each other."""
        self.met[warps] = self.clock[warps]
        self._tick(warps)

    def _tick(self, warps: np.ndarray) -> None:
        self.clock[warps] += 1
        self.knows[warps, warps] = self.clock[warps]

    def acquire(self, warps: np.ndarray, published: np.ndarray) -> None:
        """These warps learn what was published, of their own lanes as well."""
        self.met[warps] = np.maximum(self.met[warps], published[warps])
        self.knows[warps] = np.maximum(self.knows[warps], published)
