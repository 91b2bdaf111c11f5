"""Which slots of a batch [B, S] hold tokens, from what transformers says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.compat import heads_first


class Slots:
    """Row b of a batch has its tokens in the slots from ``first[b]`` (None: 0) to ``end``; made once a forward.

    ``first`` int32 [B]; ``end``, the slots that are in use, those of this forward included: an integer, or on the
    device [] or [B].
    """

    def __init__(self, first: Tensor | None, end: int | Tensor) -> None:
        self.first, self.end = first, end
        self._sequences: tuple[dict[str, Any] | None] | None = None
        self._placed: dict[tuple[Any, ...], dict[str, Any]] = {}

    @staticmethod
    def of(attention_mask: Tensor | None, end: int | Tensor) -> Slots:
        """From a mask [B, Sk] whose tokens that are no padding are True.

        Padding lies before the tokens of its row or behind them. Raises ``ValueError`` for padding between tokens, and
        for a mask that is too short; this looks at the mask on the host, unless the forward is being compiled or
        captured in a graph.
        """
        if attention_mask is None:
            return Slots(None, end)
        if attention_mask.dim() != 2:
            came = f"{attention_mask.dim()} dimensions"
            raise ValueError(f"attention_mask: got {came}; wanted [B, Sk], True for the tokens that are no padding")
        mask = attention_mask.to(torch.bool)
        length = mask.shape[1]
        if isinstance(end, int) and length < end:
            raise ValueError(f"attention_mask: got {length} slots; wanted {end}, those of the cache included")
        seen = mask.cumsum(1, dtype=torch.int32)
        first = (seen == 0).sum(1, dtype=torch.int32)
        if not _unseen(mask):
            # A slot without a token behind a first one, and a token behind that slot.
            gap = ((~mask & (seen > 0)).cumsum(1) > 0) & mask
            padded, broken = torch.stack([(first > 0).any(), gap.any()]).tolist()
            if broken:
                raise ValueError(
                    "attention_mask: got padding between the tokens of a row; wanted it before them: pad on the left "
                    "(tokenizer.padding_side = 'left') where tokens are generated"
                )
            if not padded:
                return Slots(None, end)
        return Slots(first, end)

    def place(self, num_queries: int, keys: heads_first.Tokens, *, used: bool = True) -> dict[str, Any]:
        """`heads_first.where` of these slots (without ``used``: `heads_first.segments`), made once for all layers.

        Layers of one model may lie on several devices.
        """
        device = keys.packed.device
        known = (used, num_queries, keys.batch, keys.length, keys.pitch, device)
        if known not in self._placed:
            make = heads_first.where if used else heads_first.segments
            first = None if self.first is None else self.first.to(device)
            self._placed[known] = make(num_queries, keys, first, self.end)
        return self._placed[known]

    def sequences(
        self, queries: torch.Size, num_keys: int, training: bool, kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The keyword arguments that place packed sequences among ``queries`` [B, Hq, Sq, D]; None where a row is one.

        Packed are those of ``cu_seq_lens_q`` (as of transformers' collator, with ``max_length_q``), and else those at
        whose beginning ``position_ids`` [B or 1, Sq] start again: to find these looks at them on the host, once a
        forward. Raises ``ValueError`` where packed sequences come with a mask, or with a cache outside of training,
        since what is decoded afterwards would belong to none of them.
        """
        if queries[2] < 2:
            return None
        if self._sequences is None:
            self._sequences = (self._find(queries[0], queries[2], num_keys, training, kwargs),)
        return self._sequences[0]

    def _find(
        self, batch: int, num_queries: int, num_keys: int, training: bool, kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        starts, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        positions = kwargs.get("position_ids")
        if starts is not None:
            starts = starts.to(torch.int32)
        elif positions is not None and not _unseen(positions):
            begins = positions.view(-1, positions.shape[-1]).diff(dim=1) != 1
            if self.first is not None:
                real = torch.arange(num_queries - 1, device=begins.device) + (self.end - num_queries)
                begins = begins & (real >= self.first.to(begins.device)[:, None])
            if not bool(begins.any()):
                return None
            if self.first is None:
                begins = torch.nn.functional.pad(begins, (1, 0), value=True).expand(batch, -1)
                edges = begins.flatten().nonzero()[:, 0]
                starts = torch.cat([edges, edges.new_tensor([batch * num_queries])]).to(torch.int32)
                longest = int(starts.diff().max())
        else:
            return None
        if self.first is not None:
            raise ValueError(
                "position_ids: got packed sequences beside an attention_mask with padding; wanted no attention_mask"
            )
        if num_keys != num_queries or (kwargs.get("use_cache") and not training):
            raise ValueError(
                "position_ids: got packed sequences with a cache, whose next token would belong to none of them; "
                "wanted use_cache=False"
            )
        bound = num_queries if longest is None else int(longest)
        return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": bound, "max_seqlen_k": bound}


def _unseen(tensor: Tensor) -> bool:
    """Whether the host cannot look at a tensor: while a graph is compiled or captured."""
    if torch.compiler.is_compiling():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
