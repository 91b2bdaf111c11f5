"""A MiniMax-M3 model in bfloat16, of sizes that kernels take: "msa_tiles" errs about as much as "eager" does.

Errors are against the float32 model, root mean square: where rounding turns a choice of blocks, it does in both.
"""

from __future__ import annotations

import copy
import os
import statistics
from typing import Any, NamedTuple

import torch
from compat.small_m3 import VOCABULARY, small_model, transformers
from torch import Tensor

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "dense_intermediate_size": 256,
    "shared_intermediate_size": 128,
    "num_attention_heads": 16,
    "head_dim": 64,
    "rotary_dim": 32,
    "index_head_dim": 64,
    "index_block_size": 64,
    "index_topk_blocks": 4,
    "initializer_range": 0.1,
    "max_position_embeddings": 2048,
}
RATIO = 2.0  # at most so much worse than eager
BATCHES = 4  # of a training step


class Bfloat16(NamedTuple):
    """A model, ids [B, S], and logits [B, S, V] of the same weights in float32, and eagerly in bfloat16."""

    model: Any
    ids: Tensor
    exact: Tensor
    eager: Tensor

    @staticmethod
    def draw(device: str, length: int) -> Bfloat16:
        seed = int(os.environ["MSA_TILES_SEED"])
        torch.manual_seed(seed)
        model = small_model(**SIZES).to(device=device, dtype=torch.bfloat16)
        ids = torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed)).to(device)
        wide = copy.deepcopy(model).float()
        with torch.no_grad():
            exact, eager = wide(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        model.set_attn_implementation("msa_tiles")
        return Bfloat16(model, ids, exact, eager.float())

    def accept(self, found: Tensor, rows: Any = slice(None)) -> None:
        """Logits [..., V] of some ``rows`` of ``exact``, against the worst run of as many neighbours in eager.

        Few rows may be without a turned choice in eager, or in ours, by luck: of runs of five on a CPU, 5 to 10 in a
        hundred err more than twice as much as eager does in the same five, and the worst 0.9 to 1.2 times as much as
        eager's worst.
        """
        exact = self.exact[rows]
        assert found.shape == exact.shape and bool(found.isfinite().all())
        error, size = (float(each.square().mean().sqrt()) for each in (found.float() - exact, exact))
        squares = (self.eager - self.exact).square().mean(-1)
        accepted = float(squares.unfold(1, found.shape[-2], 1).mean(-1).max().sqrt())
        assert error <= RATIO * accepted, f"rms error {error:.3g}, eager {accepted:.3g} at worst"
        assert error < 0.3 * size, f"rms error {error:.3g} of {size:.3g}"

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return self.model(*args, **kwargs).logits

    def check_prefill(self) -> None:
        self.accept(self.run(self.ids, use_cache=False))
        self.accept(self.run(self.ids[:1]), slice(0, 1))

    def check_decode(self, kind: str, prompt: int, batch: int = 2) -> None:
        """A prompt, eight tokens at once, the rest one by one."""
        ids, length = self.ids[:batch], self.ids.shape[1]
        cache = (
            transformers.DynamicCache(config=self.model.config)
            if kind == "dynamic"
            else transformers.StaticCache(config=self.model.config, max_cache_len=length + 29)
        )
        ends = [prompt, prompt + 8, *range(prompt + 9, length + 1)]
        pieces = [self.run(ids[:, begin:end], cache=cache) for begin, end in zip([0, *ends], ends, strict=False)]
        self.accept(torch.cat(pieces, 1), slice(0, batch))

    def check_padding(self, lengths: tuple[int, int], steps: int) -> None:
        """A left-padded batch, and some tokens after it."""
        width = max(lengths)
        ids, mask = torch.zeros_like(self.ids[:, :width]), torch.zeros_like(self.ids[:, :width])
        for row, length in enumerate(lengths):
            ids[row, width - length :], mask[row, width - length :] = self.ids[row, :length], 1
        cache = transformers.DynamicCache(config=self.model.config)
        pieces = [self.run(ids, attention_mask=mask, cache=cache)]
        for step in range(steps):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            nexts = torch.stack([self.ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
            pieces.append(self.run(nexts, attention_mask=mask, cache=cache))
        found = torch.cat(pieces, 1)
        for row, length in enumerate(lengths):
            self.accept(found[row, -(length + steps) :], (row, slice(0, length + steps)))

    def check_packed(self, length: int) -> None:
        """Two sequences in one row, by their positions."""
        positions = torch.cat([torch.arange(length), torch.arange(length - 5)])[None].to(self.ids.device)
        ids = torch.cat([self.ids[0, :length], self.ids[1, : length - 5]])[None]
        found = self.run(ids, position_ids=positions, use_cache=False)[0]
        self.accept(found[:length], (0, slice(0, length)))
        self.accept(found[length:], (1, slice(0, length - 5)))

    def check_training(self, length: int) -> None:
        """Gradients against those of float32, root mean square of four batches; the indexers have none."""
        models = {"exact": copy.deepcopy(self.model).float(), "eager": self.model, "msa_tiles": self.model}
        squares: dict[str, dict[str, float]] = {name: {} for name in models}

        def gradients(kind: str, ids: Tensor) -> dict[str, Tensor]:
            model = models[kind]
            model.set_attn_implementation("eager" if kind == "exact" else kind)
            model.train()(ids, labels=ids, use_cache=False).loss.backward()
            found = {name: each.grad for name, each in model.eval().named_parameters()}
            model.zero_grad(set_to_none=True)
            return found

        for shift in range(BATCHES):
            # Each id another one, so that batches have nothing in common.
            ids = 1 + (self.ids[:, :length] - 1 + shift * (VOCABULARY // BATCHES)) % (VOCABULARY - 1)
            found = {kind: gradients(kind, ids) for kind in models}
            for name, wanted in found["exact"].items():
                assert (wanted is None) == (found["msa_tiles"][name] is None) == ("indexer" in name), name
                if wanted is not None:
                    for kind, total in squares.items():
                        off = wanted if kind == "exact" else found[kind][name].float() - wanted
                        total[name] = total.get(name, 0) + float(off.norm()) ** 2
        size, eager, ours = ({name: each**0.5 for name, each in squares[kind].items()} for kind in models)
        # A router's gradient is a small difference of large sums. In one batch eager's error is 0.5% to 4% of it, which
        # another order of additions changes by a factor of two, of four batches by 1.5.
        usual = statistics.median(eager[name] / size[name] for name in size if size[name])
        for name, error in ours.items():
            told = f"{name}: error {error:.3g}, eager {eager[name]:.3g}, of {size[name]:.3g}, usually {usual:.2g} of it"
            assert error <= RATIO * max(eager[name], usual * size[name]), told
