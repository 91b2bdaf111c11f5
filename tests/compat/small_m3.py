"""Small MiniMax-M3 models of the package transformers, and how far two runs of one may differ."""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

import pytest
import rounding
import torch
from torch import Tensor


class _Imported:
    """A module that is imported when it is first asked for something, not by all that collect its tests."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks whatever stands in a test file whether it is a fixture
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._name, reason=self._reason), name)


transformers = _Imported("transformers", "the package transformers is not installed")
modeling = _Imported("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", "this transformers has no MiniMax-M3")

VOCABULARY, HIDDEN = 97, 32
# Two runs select the same blocks where the scores on both sides of a choice differ by more than this: ten times what
# float32 leaves of scores, whose size is that of the products of normed vectors of 16 elements.
GAP = 1e-4


def config(**changes: Any) -> Any:
    """A dense layer, then sparse ones, of all kinds of MLP. Every expert is chosen: routing is not what differs."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "dense_intermediate_size": 32,
        "shared_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.models.minimax_m3_vl.MiniMaxM3VLTextConfig(**{**sizes, **changes})


def small_model(**changes: Any) -> Any:
    """For inference, with experts that know float64."""
    made = modeling.MiniMaxM3VLForCausalLM._from_config(
        config(**changes), attn_implementation="eager", experts_implementation="eager"
    )
    return made.eval()


class Drawn(NamedTuple):
    """A model, token ids [B, S], what its eager form says of them in float64: logits [B, S, V]; and that form."""

    model: Any
    ids: Tensor
    exact: Tensor
    double: Any

    def run(self, implementation: str, *args: Any, **kwargs: Any) -> Any:
        """A forward of the model; gradients as the caller has it."""
        self.model.set_attn_implementation(implementation)
        return self.model(*args, **kwargs)

    def eager(self, ids: Tensor) -> Tensor:
        """Eager logits of whole sequences, each by itself."""
        with torch.no_grad():
            return self.run("eager", ids, use_cache=False).logits

    def accept(self, found: Tensor, exact: Tensor | None = None, eager: Tensor | None = None) -> None:
        """Logits that err at most twice as much as the eager ones of their dtype, and never much."""
        exact = self.exact if exact is None else exact
        eager = self.eager(self.ids) if eager is None else eager
        assert found.shape == exact.shape and bool(found.isfinite().all())
        least = rounding.bound(found.dtype, 4 * HIDDEN, float(exact.abs().max()))
        error, accepted = (found - exact).abs().max(), 2 * (eager - exact).abs().max() + least
        assert error <= accepted, f"off by {float(error):.3g}, accepted {float(accepted):.3g}"
        assert accepted < 1e-3 * exact.abs().max()


def draw(batch: int, length: int, seed: int = 0, **changes: Any) -> Drawn:
    """A model and tokens for which no choice of blocks is so close that rounding may turn it."""
    generator = torch.Generator().manual_seed(int(os.environ["MSA_TILES_SEED"]) + seed)
    for _ in range(50):
        torch.manual_seed(int(torch.randint(1 << 31, (), generator=generator)))
        model = small_model(**changes)
        ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
        double = copy.deepcopy(model).double()
        watch = Watch(double)
        with torch.no_grad():
            exact = double(ids, use_cache=False).logits
        assert len(watch.gaps) == sum(kind != "full_attention" for kind in model.config.layer_types)
        if min(watch.gaps) > GAP:
            return Drawn(model, ids, exact, double)
    raise AssertionError("every draw had close scores")


class Watch:
    """The `gap` of every indexer of a model, in its next forward."""

    def __init__(self, model: Any) -> None:
        self.gaps: list[float] = []
        indexers = [module for module in model.modules() if isinstance(module, modeling.MiniMaxM3VLIndexer)]
        self._hooks = [indexer.register_forward_pre_hook(self._look) for indexer in indexers]

    def _look(self, indexer: Any, args: Any) -> None:
        self.gaps.append(gap(indexer, *args))
        self._hooks.pop(0).remove()


def gap(indexer: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], cache: None, positions: Tensor) -> float:
    """The least difference between the worst chosen and the best other block that is no forced one."""

    def heads(projection: Any, norm: Any) -> Tensor:
        x = norm(projection(hidden).unflatten(-1, (-1, indexer.head_dim)))
        cos, sin = (part[:, :, None] for part in embeddings)
        half = cos.shape[-1] // 2
        turned, kept = x[..., : 2 * half], x[..., 2 * half :]
        other = torch.cat([-turned[..., half:], turned[..., :half]], -1)
        return torch.cat([turned * cos + other * sin, kept], -1)

    q, k = heads(indexer.q_proj, indexer.q_norm), heads(indexer.k_proj, indexer.k_norm)[:, :, 0]
    scores = torch.einsum("bqhd,bkd->bqhk", q, k)
    length, size = k.shape[1], indexer.block_size
    slots = torch.arange(length)
    scores = scores.masked_fill((slots[None, :] > slots[:, None])[:, None], -torch.inf)
    least = torch.inf
    for row in range(length):
        own = row // size
        free = indexer.topk_blocks - 1
        if own <= free:
            continue  # all are chosen
        blocks = torch.stack([part.amax(-1) for part in scores[:, row, :, : own * size].split(size, dim=-1)], -1)
        ranked = blocks.sort(-1, descending=True).values
        least = min(least, float((ranked[..., free - 1] - ranked[..., free]).min()))
    return least
