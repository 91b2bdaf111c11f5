"""Where a ring stands, as two variables; msa_tiles.dsl.tilelang.stages has it as one array."""

import tilelang.language as T


@T.macro
def next_stage(stage: T.Ref, phase: T.Ref, depth):
    """The stage of a ring that follows, and its phase, which turns with every round."""
    stage = stage + 1
    if stage == depth:
        stage = 0
        phase = phase ^ 1
