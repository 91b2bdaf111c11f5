"""MiniMax-M3 of transformers on a GPU with "msa_tiles": logits, gradients, and a layer at a length that eager lacks."""

from __future__ import annotations

import pytest
import torch
from compat.bf16_m3 import Bfloat16
from compat.small_m3 import config, modeling, transformers

from msa_tiles.compat.transformers import register

pytestmark = pytest.mark.gpu

PROMPT, DECODED = 600, 64
LONG = 131072


@pytest.fixture(scope="module", autouse=True)  # before the model, which is set to it
def registered():
    assert modeling.MiniMaxM3VLIndexer  # else skipped
    with register():
        yield


@pytest.fixture(scope="module")
def drawn() -> Bfloat16:
    return Bfloat16.draw("cuda", PROMPT + DECODED)


def test_prefill(drawn: Bfloat16) -> None:
    drawn.check_prefill()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("batch", [1, 2])
def test_cached_decode(drawn: Bfloat16, kind: str, batch: int) -> None:
    drawn.check_decode(kind, PROMPT, batch)


def test_left_padding(drawn: Bfloat16) -> None:
    drawn.check_padding((333, 600), 8)


def test_packed_sequences(drawn: Bfloat16) -> None:
    drawn.check_packed(400)


def test_a_training_step(drawn: Bfloat16) -> None:
    drawn.check_training(PROMPT)


def test_a_compiled_step_in_a_graph(drawn: Bfloat16) -> None:
    """A decode step with a static cache as one CUDA graph, replayed for three tokens."""
    model, ids = drawn.model, drawn.ids
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + DECODED)
    model.set_attn_implementation("msa_tiles")
    drawn.run(ids[:, :PROMPT], cache=cache)
    model.set_experts_implementation("batched_mm")
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        found = [step(ids[:, place : place + 1], cache=cache).logits.clone() for place in range(PROMPT, PROMPT + 5)]
    model.set_experts_implementation("eager")
    drawn.accept(torch.cat(found, 1), (slice(None), slice(PROMPT, PROMPT + 5)))


def test_a_layer_prefills_128k_tokens() -> None:
    """Of MiniMax-M3's shape, in a fraction of the 275 GB of scores; and its decode path says the same of the end."""
    settings = config(
        hidden_size=1024, num_attention_heads=64, num_key_value_heads=4, head_dim=128, rotary_dim=64,
        index_n_heads=4, index_head_dim=128, index_block_size=128, index_topk_blocks=16,
        max_position_embeddings=LONG, initializer_range=0.05,
    )  # fmt: skip
    settings._attn_implementation = "msa_tiles"
    with torch.device("cuda"):
        layer = modeling.MiniMaxM3VLAttention(settings, 1).to(torch.bfloat16).eval()
        rotary = modeling.MiniMaxM3VLRotaryEmbedding(settings)
        for norm in (layer.q_norm, layer.k_norm, layer.indexer.q_norm, layer.indexer.k_norm):
            torch.nn.init.zeros_(norm.weight)
        hidden = torch.randn(1, LONG, settings.hidden_size, dtype=torch.bfloat16)
        positions = torch.arange(LONG)[None]
    few = 16

    def forward(begin: int, end: int, cache: object) -> torch.Tensor:
        place = positions[:, begin:end]
        return layer(hidden[:, begin:end], rotary(hidden, place), None, cache, position_ids=place)[0]

    cache = transformers.DynamicCache(config=settings)
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        whole = forward(0, LONG, None)
        assert torch.cuda.max_memory_allocated() < 40 * 2**30
        forward(0, LONG - few, cache)
        last = forward(LONG - few, LONG, cache)
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(last[0], whole[0, -few:], atol=0.03 * float(whole.std()) * 4, rtol=0.02)
