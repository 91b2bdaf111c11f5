"""TileLang simulator."""

from msa_tiles.simulator.errors import *
from msa_tiles.simulator.kernel import simulate

__all__ = ["simulate"]
