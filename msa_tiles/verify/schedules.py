"""Decode a schedule and compare it with the block ids that it was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.call import edges
from msa_tiles.ops import Schedule
from msa_tiles.reference.batch import read_batch
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Disagreement
from msa_tiles.verify.inputs import Lengths


def defined_parts(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Edges int64 [E, 5] and tasks [N, 2], as `msa_tiles.call.edges.decoded` says."""
    return edges.decoded(schedule, schedule.topk)


def check(parts: tuple[Tensor, ...], ids: Tensor, block_size: int, lengths: Lengths) -> compare.Errors:
    """Every visible id is one edge of a task of its block, and there is nothing else.

    Raises Disagreement.
    """
    found, tasks = parts
    batch = read_batch(ids.shape[1], ids.device, **lengths.keywords())
    starts = lengths.cu_seqlens_k.to(torch.int64) if ids.is_cuda else None
    wanted = edges.of_ids(ids, batch, block_size, starts)
    errors = compare.same("edges", _sorted(found), _sorted(wanted))
    if bool((tasks[:, 0] <= 0).any()):
        raise Disagreement("tasks: one has no edges")
    return errors


def _sorted(rows: Tensor) -> Tensor:
    """Rows in the order of (head, query, slot), which names an edge."""
    if len(rows) == 0:
        return rows
    queries, slots = int(rows[:, 1].max()) + 1, int(rows[:, 2].max()) + 1
    return rows[((rows[:, 0] * queries + rows[:, 1]) * slots + rows[:, 2]).argsort(stable=True)]
