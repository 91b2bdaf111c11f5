"""Memory for partial results: the caller's, or new."""

from __future__ import annotations

import torch
from torch import Tensor


def partial_bytes(parts: int, num_q_heads: int, head_dim: int) -> int:
    """What ``parts`` partial results of every head take: BF16 outputs and float32 LSE."""
    return parts * num_q_heads * (2 * head_dim + 4)


def partials(workspace: Tensor | None, like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Partial results of ``like`` [T, Hq, D]: outputs [rows, columns, Hq, D] and LSE [rows, columns, Hq].

    They lie in the workspace when there is one.
    """
    _, num_q_heads, head_dim = like.shape
    size = partial_bytes(rows * columns, num_q_heads, head_dim)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
    lse_begin = rows * columns * num_q_heads * head_dim * 2
    outputs, lses, _ = workspace.split_with_sizes((lse_begin, size - lse_begin, workspace.numel() - size))
    outputs = outputs.view(like.dtype).view(rows, columns, num_q_heads, head_dim)
    return outputs, lses.view(torch.float32).view(rows, columns, num_q_heads)
