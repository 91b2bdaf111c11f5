"""What a call would do: which kernels, how often, in how much memory, and how long that takes. Nothing is computed."""

from msa_tiles.explaining.rehearsal import explain
from msa_tiles.explaining.report import Asked, Expectation, Explanation, Launched

__all__ = ["Asked", "Expectation", "Explanation", "Launched", "explain"]
