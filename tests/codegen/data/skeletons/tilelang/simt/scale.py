"""Every row times a number.

Grid: ROWS rows a CTA.
"""

import tilelang.language as T

ROWS = 1  # <- tile.rows
UNROLL: int = 1  # <- tile.unroll
ELEMENT = "float32"  # <- precision.multiply
WIDTHS = (1,)  # <- plan.variants.width
LIMITS = {"rows": 1}  # <- plan.tile
SMS = 1  # <- target.sm_count
# % if plan.compute == "float32":
ACCUMULATOR = "float32"
# % else
ACCUMULATOR = "bfloat16"
UNKNOWN = 1  # <- tile.of_another_branch
# % endif


def scale(width: int):
    """Build the kernel for one width."""
    name = f"{{{width}}}"
    # % for step in range(tile.unroll)
    T.copy(name, ACCUMULATOR)
    # % endfor
    return name
