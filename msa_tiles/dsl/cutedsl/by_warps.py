"""Right sides of products that several warps decode, each some rows of every block: what formats share.

A module of msa_tiles.dsl.cutedsl.operands puts `ByWarps` before the right side of its format and says in KEEPERS how
many warps the kernel's role keeper has. All of them arrive where one did.
"""

import cutlass.cute as cute

from msa_tiles.dsl.table import Parts, declares, lane, warps

KEEPERS = 5  # what is left of a warpgroup beside a claimer and two gatherers, and one more


@declares
def by_warps(found, keeper):
    """Parts in which each warp of the keeper fills what one lane of it filled."""
    return Parts(
        tuple(
            each._replace(full=tuple(warps(keeper) if who == lane(keeper) else who for who in each.full))
            for each in found.pipelines
        ),
        found.buffers,
    )


class ByWarps:
    """Before a right side that one warp decodes (msa_tiles.dsl.cutedsl.decoded_right)."""

    def decode_rows(self, *taken):
        """Rows of bytes -> a tile: the share of this warp, in the place of what one member of one would do."""
        role = "keeper"
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.table.first_warp(role)
        return super().decode_rows(*taken[:-2], member, self.table.roles[role].warps)
