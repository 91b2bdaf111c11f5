"""What roles do with rings of stages and the barriers between them."""

import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.topk import pick


@cute.jit
def following(place: Int32, phase: Int32, end, begin=0):
    """The place behind one in the ring `begin` .. `end` - 1, and its phase."""
    place = place + 1
    if place == end:
        place = Int32(begin)
        phase = phase ^ 1
    return place, phase


@cute.jit
def preceding(place: Int32, phase: Int32, end):
    """The place before one in the ring 0 .. `end` - 1, and its phase."""
    return pick(place == 0, end - 1, place - 1), pick(place == 0, phase ^ 1, phase)


@cute.jit
def arrive(barrier: cute.Pointer):
    """One arrival for a warp, behind what all its lanes have done."""
    cute.arch.sync_warp()
    arrive_alone(barrier)


@cute.jit
def arrive_alone(barrier: cute.Pointer):
    """The same where something has brought the warp together, such as waiting for a product, or only lane 0 counts."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)
