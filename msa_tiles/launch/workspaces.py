"""Memory for partial results: the caller's, or new."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.launch.lookup import ALIGNMENT

# What the partial results of one window of attention queries may take when the caller does not say.
WORKSPACE_BYTES = 1 << 30


def partial_bytes(parts: int, num_q_heads: int, head_dim: int) -> int:
    """What ``parts`` partial results of every head take: BF16 outputs and float32 LSE."""
    return parts * num_q_heads * (2 * head_dim + 4)


def partials(workspace: Tensor | None, q: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Partial outputs [rows, columns, Hq, D] and LSE [rows, columns, Hq], in the workspace when there is one."""
    _, num_q_heads, head_dim = q.shape
    size = partial_bytes(rows * columns, num_q_heads, head_dim)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    lse_begin = rows * columns * num_q_heads * head_dim * 2
    outputs, lses, _ = workspace.split_with_sizes((lse_begin, size - lse_begin, workspace.numel() - size))
    outputs = outputs.view(q.dtype).view(rows, columns, num_q_heads, head_dim)
    return outputs, lses.view(torch.float32).view(rows, columns, num_q_heads)


def check_alignment(name: str, tensor: Tensor) -> None:
    """Refuse a scratch tensor that begins at an odd place; addresses are unknown while a graph is traced."""
    behind = tensor.data_ptr() % ALIGNMENT
    if behind:
        came = f"an address {behind} bytes behind a multiple of {ALIGNMENT}"
        validate.refuse(name, came, f"a multiple of {ALIGNMENT}")


def workspace_bytes(value: int | None) -> int:
    """The bound of partial results."""
    if value is None:
        return WORKSPACE_BYTES
    validate.integer("workspace", value, 1)
    return value
