"""Keys or values of e4m3 with float32 scales, decoded to 16 bits where the product takes them.

A scale belongs to a head, or with token_scales to each token of a head. Left sides become 16 bits in registers, right
sides by a role of their own, and what lies in a kernel's ring by decoding warps: a file for each place, and one for
what they share.
"""

from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.cutedsl.e4m3_left import Left, parts
from msa_tiles.dsl.cutedsl.e4m3_right import Right, right_parts
from msa_tiles.dsl.cutedsl.e4m3_ring import InRing, in_ring, query_parts, ring_parts
from msa_tiles.dsl.cutedsl.e4m3_storage import Stored, multiplied

TENSORS = ("", "_scale")

__all__ = [
    "TENSORS",
    "Held",
    "HeldRight",
    "InRing",
    "Left",
    "Right",
    "Stored",
    "in_ring",
    "multiplied",
    "parts",
    "query_parts",
    "right_parts",
    "ring_parts",
]
