"""A MiniMax Sparse Attention layer for training and prefill."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msa_tiles import ops
from msa_tiles.call import validate
from msa_tiles.nn.parts import HeadNorm, rotate

# What autocast casts.
CAST = {torch.float32, torch.float16, torch.bfloat16}


class AttentionOutput(NamedTuple):
    """``hidden`` like the layer's input; ``kl`` a scalar or None; ``block_indices`` int32 [Hkv, T, topk] or None."""

    hidden: Tensor
    kl: Tensor | None
    block_indices: Tensor | None


class MiniMaxSparseAttention(nn.Module):
    """Grouped-query attention over the blocks that an index branch selects, and the loss that trains that branch.

    After "MiniMax Sparse Attention" (arXiv 2606.13392). Queries, keys, index queries (one head for each KV head) and
    the one index key are projected from the input, normed per head and rotated in part (`HeadNorm`, `rotate`); the
    names of the submodules are those of MiniMax-M3's checkpoints.

    The two branches are trained apart. The index branch reads ``hidden.detach()``, and the teacher of its loss is
    detached: ``kl`` moves the ``index_*`` parameters and nothing else, the output moves everything else and not them.
    Add the ``kl`` of every layer to the model's loss; as no parameter has both, a weight before it is a learning rate.

    Training begins with ``warmup = True``: attention is dense, and the index branch learns its distribution over the
    whole prefix. After some steps set ``warmup = False``: from then on attention reads the selected blocks alone and
    the index branch is trained on what it selected. `warmup` is no parameter; a change of it recompiles a compiled
    layer once.
    """

    def __init__(
        self,
        hidden_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int = 128,
        index_dim: int = 128,
        topk: int = 16,
        block_size: int = 128,
        init_blocks: int = 0,
        local_blocks: int = 1,
        rotary_dim: int = 64,
        rope_base: float = 5_000_000.0,
        norm_eps: float = 1e-6,
        warmup: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``hidden_size`` is that of the input; ``num_q_heads`` is a multiple of ``num_kv_heads``.

        A query attends to ``topk`` blocks of ``block_size`` tokens, the ``init_blocks`` first and the ``local_blocks``
        last ones among them. ``rotary_dim`` of the ``head_dim`` and of the ``index_dim`` dimensions are rotated, with
        ``rope_base``, the rest are not. ``norm_eps`` is that of the `HeadNorm`, ``device`` and ``dtype`` are those of
        the parameters.

        Raises ``ValueError`` or ``TypeError`` for sizes that cannot be or do not fit together.
        """
        super().__init__()
        for name, value, least in (
            ("hidden_size", hidden_size, 1),
            ("num_q_heads", num_q_heads, 1),
            ("num_kv_heads", num_kv_heads, 1),
            ("head_dim", head_dim, 1),
            ("index_dim", index_dim, 1),
            ("topk", topk, 1),
            ("block_size", block_size, 1),
            ("init_blocks", init_blocks, 0),
            ("local_blocks", local_blocks, 0),
            ("rotary_dim", rotary_dim, 0),
        ):
            validate.integer(name, value, least)
        for name, number in (("rope_base", rope_base), ("norm_eps", norm_eps)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                validate.refuse_type(name, type(number).__name__, "a number")
            if not 0 < number < math.inf:
                validate.refuse(name, repr(number), "a finite number above 0")
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads: got {num_q_heads}; wanted a multiple of the {num_kv_heads} KV heads")
        most = min(head_dim, index_dim)
        if rotary_dim % 2 or rotary_dim > most:
            raise ValueError(f"rotary_dim: got {rotary_dim}; wanted an even number up to {most}")
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.head_dim, self.index_dim = head_dim, index_dim
        self.topk, self.block_size = topk, block_size
        self.init_blocks, self.local_blocks = init_blocks, local_blocks
        self.rotary_dim, self.rope_base = rotary_dim, rope_base
        self.warmup = warmup

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_q_heads * head_dim, bias=False, **made)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False, **made)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False, **made)
        self.o_proj = nn.Linear(num_q_heads * head_dim, hidden_size, bias=False, **made)
        self.q_norm = HeadNorm(head_dim, norm_eps, **made)
        self.k_norm = HeadNorm(head_dim, norm_eps, **made)
        self.index_q_proj = nn.Linear(hidden_size, num_kv_heads * index_dim, bias=False, **made)
        self.index_k_proj = nn.Linear(hidden_size, index_dim, bias=False, **made)
        self.index_q_norm = HeadNorm(index_dim, norm_eps, **made)
        self.index_k_norm = HeadNorm(index_dim, norm_eps, **made)

    def forward(
        self,
        hidden: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        token_weights: Tensor | None = None,
        return_kl: bool | None = None,
        return_block_indices: bool = False,
    ) -> AttentionOutput:
        """Causal self-attention over ``hidden`` [T, hidden_size], or [B, S, hidden_size] for sequences of one length.

        ``hidden`` is of the dtype of the weights, or autocast is on. ``cu_seqlens`` int32 [B + 1] packs sequences in
        the first form; ``max_seqlen`` bounds their lengths on the host. Rows behind its last element are padding: their
        output is 0 and they add nothing to the loss, but the mean is over all T (or B * S) tokens. ``return_kl``
        defaults to ``self.training``. ``token_weights`` float32 [T] (or [B, S]) weigh the loss as in `ops.index_kl`,
        which says how they make a mean over some of the tokens. With ``return_block_indices`` the selection comes
        along, in warm-up the one that the index branch would make.
        """
        shape = hidden.shape
        if hidden.dim() not in (2, 3):
            raise ValueError(f"hidden: got {hidden.dim()} dimensions; wanted [T, hidden_size] or [B, S, hidden_size]")
        if shape[-1] != self.q_proj.in_features:
            validate.refuse("hidden", f"hidden size {shape[-1]}", str(self.q_proj.in_features))
        self._check_dtype(hidden)
        if token_weights is not None:
            # Flattened, weights [S, B] would pass for [B, S].
            dims = "[T]" if hidden.dim() == 2 else "[B, S]"
            validate.float32("token_weights", token_weights, shape[:-1], dims, hidden, "hidden")
            token_weights = token_weights.flatten()
        if hidden.dim() == 3:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens: got a tensor beside hidden [B, S, hidden_size]; wanted None")
            batch, length = shape[:2]
            cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=hidden.device) * length
            max_seqlen = length
            hidden = hidden.flatten(0, 1)
        elif cu_seqlens is not None:
            validate.int32("cu_seqlens", cu_seqlens, [None], "[B + 1]", hidden, "hidden")
            if cu_seqlens.shape[0] == 0:
                validate.refuse("cu_seqlens", "shape [0]", "[B + 1], at least one element")
        want_kl = self.training if return_kl is None else return_kl
        positions = _positions(hidden.shape[0], cu_seqlens, hidden.device)

        q, k = self._main_branch(hidden, positions)
        v = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        where = {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": max_seqlen,
            "max_seqlen_k": max_seqlen,
        }
        attend = self._attend_densely if self.warmup else self._attend_sparsely
        out, kl, selected = attend(
            q, k, v, hidden.detach(), positions, where, token_weights, want_kl, return_block_indices
        )
        return AttentionOutput(self.o_proj(out.flatten(1)).view(shape), kl, selected)

    def queries_and_keys(self, hidden: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q [T, Hq, D] and k [Tk, Hkv, D] of the main branch for ``hidden`` [T, hidden_size], to look at attention."""
        self._check_dtype(hidden)
        return self._main_branch(hidden, _positions(hidden.shape[0], cu_seqlens, hidden.device))

    def _check_dtype(self, hidden: Tensor) -> None:
        """The input's is that of the weights, or autocast makes them alike."""
        wanted = self.q_proj.weight.dtype
        # Layers in the place of a projection may keep weights of other kinds, and say themselves what they take.
        if hidden.dtype == wanted or not wanted.is_floating_point:
            return
        kind = hidden.device.type
        if not hidden.is_meta and torch.is_autocast_enabled(kind) and {hidden.dtype, wanted} <= CAST:
            return
        came = f"dtype {hidden.dtype}"
        validate.refuse_type("hidden", came, f"{wanted} like the layer's weights, or a call under torch.autocast")

    def _main_branch(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q = self._heads(self.q_proj(hidden), self.head_dim, self.q_norm, positions)
        return q, self._heads(self.k_proj(hidden), self.head_dim, self.k_norm, positions)

    def _index_branch(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """idx_q [T, Hkv, Di] and idx_k [T, Di]."""
        idx_q = self._heads(self.index_q_proj(hidden), self.index_dim, self.index_q_norm, positions)
        idx_k = self._heads(self.index_k_proj(hidden), self.index_dim, self.index_k_norm, positions)
        return idx_q, idx_k[:, 0]

    def _heads(self, x: Tensor, dim: int, norm: HeadNorm, positions: Tensor) -> Tensor:
        return rotate(norm(x.unflatten(-1, (-1, dim))), positions, self.rotary_dim, self.rope_base)

    def _attend_sparsely(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        source: Tensor,
        positions: Tensor,
        where: dict[str, Any],
        token_weights: Tensor | None,
        want_kl: bool,
        want_selection: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        results = ops.msa_attention(
            q,
            k,
            v,
            *self._index_branch(source, positions),
            self.topk,
            block_size=self.block_size,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
            token_weights=token_weights,
            return_kl=want_kl,
            return_block_indices=want_selection,
            **where,
        )
        out, *extra = results if isinstance(results, tuple) else (results,)
        # Dynamo of torch 2.11 makes a tuple of what a starred name takes, so nothing is popped off it.
        return out, extra[0] if want_kl else None, extra[-1] if want_selection else None

    def _attend_densely(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        source: Tensor,
        positions: Tensor,
        where: dict[str, Any],
        token_weights: Tensor | None,
        want_kl: bool,
        want_selection: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out, lse = ops.dense_attention(q, k, v, return_lse=True, **where)
        if not (want_kl or want_selection):
            return out, None, None
        idx_q, idx_k = self._index_branch(source, positions)
        kl = selected = None
        if want_kl:
            kl = ops.index_kl(
                q, k, lse, idx_q, idx_k, None, block_size=self.block_size, token_weights=token_weights, **where
            )
        if want_selection:
            selected = ops.select_blocks(
                idx_q.detach(),
                idx_k.detach(),
                self.topk,
                block_size=self.block_size,
                init_blocks=self.init_blocks,
                local_blocks=self.local_blocks,
                **where,
            )
        return out, kl, selected

    def extra_repr(self) -> str:
        sizes = f"topk={self.topk}, block_size={self.block_size}, rotary_dim={self.rotary_dim}"
        return f"{self.num_q_heads} query heads on {self.num_kv_heads} KV heads, {sizes}, warmup={self.warmup}"


def _positions(total: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """The position of each token in its own sequence, without a synchronisation; int64 [T]."""
    rows = torch.arange(total, device=device)
    if cu_seqlens is None:
        return rows
    ends = cu_seqlens[1:].to(torch.int64)
    # Rows past the last sequence count on from its beginning: nobody reads them.
    sequence = torch.searchsorted(ends, rows, right=True).clamp_max(max(ends.shape[0] - 1, 0))
    return rows - cu_seqlens.to(torch.int64)[sequence]
