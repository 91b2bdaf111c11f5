"""MiniMax-M3 of transformers says the same with "msa_tiles" as with "eager", where the original is well defined."""

from __future__ import annotations

import os

import pytest
import rounding
import torch
from compat.bf16_m3 import Bfloat16
from compat.small_m3 import HIDDEN, Drawn, draw, modeling, small_model, transformers
from torch import Tensor

from msa_tiles.compat import transformers as compat

PROMPT, DECODED = 36, 64


@pytest.fixture(autouse=True)
def registered():
    assert modeling.MiniMaxM3VLIndexer  # else skipped
    torch.manual_seed(int(os.environ["MSA_TILES_SEED"]))
    with compat.register():
        yield


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(2, PROMPT + DECODED)


CACHES = {
    "dynamic": lambda settings: transformers.DynamicCache(config=settings),
    "static": lambda settings: transformers.StaticCache(config=settings, max_cache_len=PROMPT + DECODED + 13),
}


def ours(drawn: Drawn, *args, **kwargs) -> Tensor:
    with torch.no_grad():
        return drawn.run("msa_tiles", *args, **kwargs).logits


def test_prefill(drawn: Drawn) -> None:
    drawn.accept(ours(drawn, drawn.ids))
    drawn.accept(ours(drawn, drawn.ids, use_cache=False))
    alone = ours(drawn, drawn.ids[:1])
    drawn.accept(alone, drawn.exact[:1], drawn.eager(drawn.ids)[:1])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.drawn(1)
def test_cached_decode(drawn: Drawn, kind: str) -> None:
    """A prompt, some tokens in one piece, the rest one by one."""
    cache = CACHES[kind](drawn.model.config)
    ends = [PROMPT, PROMPT + 5, *range(PROMPT + 6, PROMPT + DECODED + 1)]
    pieces = [ours(drawn, drawn.ids[:, begin:end], cache=cache) for begin, end in zip([0, *ends], ends, strict=False)]
    drawn.accept(torch.cat(pieces, 1))


def test_cached_decode_of_one_sequence(drawn: Drawn) -> None:
    """Of a batch of one; tokens that were not accepted are taken off the cache again."""
    cache = CACHES["dynamic"](drawn.model.config)
    ids, exact, eager = drawn.ids[1:], drawn.exact[1:], drawn.eager(drawn.ids)[1:]
    pieces = [ours(drawn, ids[:, :PROMPT], cache=cache)]
    for begin in range(PROMPT, PROMPT + 12, 3):
        wrong = torch.flip(ids[:, begin : begin + 5], dims=(1,))
        ours(drawn, wrong, cache=cache)
        cache.crop(-5)
        pieces += [
            ours(drawn, ids[:, begin : begin + 1], cache=cache),
            ours(drawn, ids[:, begin + 1 : begin + 3], cache=cache),
        ]
    found = torch.cat(pieces, 1)
    drawn.accept(found, exact[:, : found.shape[1]], eager[:, : found.shape[1]])


def padded(lengths: tuple[int, ...], ids: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, max of lengths]."""
    width = max(lengths)
    tokens, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width)
    for row, length in enumerate(lengths):
        place = slice(width - length, None) if side == "left" else slice(0, length)
        tokens[row, place], mask[row, place] = ids[row, :length], 1
    return tokens, mask.to(torch.int64)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("given", ["counted", "default"])
def test_a_row_with_padding_on_its_left_is_what_it_is_alone(drawn: Drawn, kind: str, given: str) -> None:
    """Position ids as `generate` counts them, or none; then tokens one by one."""
    lengths, steps = (21, 48), 9
    tokens, mask = padded(lengths, drawn.ids, "left")
    cache = CACHES[kind](drawn.model.config)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    positions = counted if given == "counted" else None
    pieces = [ours(drawn, tokens, attention_mask=mask, position_ids=positions, cache=cache)]
    for step in range(steps):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)
        nexts = torch.stack([drawn.ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
        positions = torch.tensor(lengths)[:, None] + step if given == "counted" else None
        pieces.append(ours(drawn, nexts, attention_mask=mask, position_ids=positions, cache=cache))
    found = torch.cat(pieces, 1)
    for row, length in enumerate(lengths):
        total = length + steps
        part = found[row, -total:], drawn.exact[row, :total], drawn.eager(drawn.ids[row : row + 1, :total])[0]
        drawn.accept(*part)


def test_padding_on_the_right_changes_no_token_before_it(drawn: Drawn) -> None:
    lengths = (30, 52)
    tokens, mask = padded(lengths, drawn.ids, "right")
    found = ours(drawn, tokens, attention_mask=mask)
    for row, length in enumerate(lengths):
        drawn.accept(found[row, :length], drawn.exact[row, :length], drawn.eager(drawn.ids)[row, :length])


def test_generation_of_a_padded_batch_is_that_of_its_prompts(drawn: Drawn) -> None:
    lengths = (17, 29)
    tokens, mask = padded(lengths, drawn.ids, "left")
    options = {"max_new_tokens": 6, "do_sample": False}
    drawn.model.set_attn_implementation("msa_tiles")
    found = drawn.model.generate(tokens, attention_mask=mask, **options)[:, -6:]
    drawn.model.set_attn_implementation("eager")
    for row, length in enumerate(lengths):
        wanted = drawn.model.generate(
            drawn.ids[row : row + 1, :length], attention_mask=torch.ones(1, length, dtype=torch.int64), **options
        )
        assert torch.equal(found[row], wanted[0, -6:])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "assisted"])
def test_generation_that_rearranges_its_cache(drawn: Drawn, options: dict[str, int]) -> None:
    ids = drawn.ids[: 2 if "num_beams" in options else 1, :PROMPT]
    found = []
    for implementation in ("eager", "msa_tiles"):
        drawn.model.set_attn_implementation(implementation)
        found.append(drawn.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **options
        ))  # fmt: skip
    assert torch.equal(*found)


@pytest.mark.parametrize("how", ["positions", "rows", "shared", "cu_seq_lens"])
def test_packed_sequences_are_what_they_are_alone(drawn: Drawn, how: str) -> None:
    lengths = (33, 1, 40)
    sequences = [drawn.ids[0, :33], drawn.ids[1, :1], drawn.ids[1, :40]]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens, further = torch.cat(sequences)[None], {}
    if how == "cu_seq_lens":
        starts = torch.tensor([0, *lengths]).cumsum(0)
        further = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 40, "max_length_k": 40}
    if how == "rows":  # the same again in a second row, in another order
        tokens = torch.cat([tokens, torch.cat(sequences[::-1])[None]])
        positions = torch.cat([positions, torch.cat([torch.arange(length) for length in lengths[::-1]])[None]])
    if how == "shared":  # positions of all rows at once
        tokens = tokens.expand(2, -1)
    found = ours(drawn, tokens, position_ids=positions, use_cache=False, **further)
    order = [sequences, sequences if how == "shared" else sequences[::-1]][: tokens.shape[0]]
    for row, parts in zip(found, order, strict=True):
        for part, sequence in zip(row.split([len(each) for each in parts]), parts, strict=True):
            source = 0 if len(sequence) == 33 else 1
            exact = drawn.exact[source, : len(sequence)]
            drawn.accept(part, exact, drawn.eager(sequence[None])[0])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_training_step_has_the_same_gradients(drawn: Drawn, checkpointed: bool) -> None:
    """All parameters but the indexers', which have none here and there: a selection has no gradient."""

    def gradients(model: torch.nn.Module, implementation: str) -> dict[str, Tensor | None]:
        model.set_attn_implementation(implementation)
        if checkpointed:
            model.activation_checkpointing_enable()
        ids = drawn.ids[:, :60]
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        found = {name: each.grad for name, each in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        model.activation_checkpointing_disable()
        model.eval()
        return found

    exact, eager = gradients(drawn.double, "eager"), gradients(drawn.model, "eager")
    for name, found in gradients(drawn.model, "msa_tiles").items():
        if "indexer" in name:
            assert found is eager[name] is None
            continue
        # A gradient is a sum over 120 tokens, of what three layers make of each.
        size = float(exact[name].abs().max())
        error, accepted = (each - exact[name] for each in (found, eager[name]))
        least = rounding.bound(found.dtype, 120 + 4 * HIDDEN, size)
        assert error.abs().max() <= 2 * accepted.abs().max() + least < 1e-3 * size, name


@pytest.mark.parametrize("few", [False, True])
def test_autocast(drawn: Drawn, few: bool) -> None:
    """A float32 model that computes in bfloat16 errs at most twice as much as the eager one does."""
    exact, length = drawn.exact, 20 if few else drawn.ids.shape[1]
    errors = []
    for implementation in ("eager", "msa_tiles"):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = drawn.run(implementation, drawn.ids[:, :length], use_cache=False).logits
        errors.append(float((found - exact[:, :length]).square().mean().sqrt()))
    assert 0 < errors[1] <= 2 * errors[0] < 0.5 * float(exact.square().mean().sqrt())


@pytest.mark.slow
def test_compiled_decode_needs_no_look_at_the_host(drawn: Drawn) -> None:
    """A step with a static cache is one graph, with and without padding."""
    cache = CACHES["static"](drawn.model.config)
    tokens, mask = padded((21, 48), drawn.ids, "left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ours(drawn, tokens, attention_mask=mask, position_ids=positions, cache=cache)
    drawn.model.set_experts_implementation("batched_mm")  # the eager ones are no graph
    step = torch.compile(drawn.model, fullgraph=True, backend="eager")
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)
    nexts = torch.stack([drawn.ids[0, 21], drawn.ids[1, 48]])[:, None]
    with torch.no_grad():
        found = step(nexts, attention_mask=mask, position_ids=torch.tensor([[21], [48]]), cache=cache).logits
    drawn.model.set_experts_implementation("eager")
    for row, length in enumerate((21, 48)):
        exact = drawn.exact[row, length : length + 1]
        drawn.accept(found[row], exact, drawn.eager(drawn.ids)[row, length : length + 1])


def test_an_index_head_may_serve_several_kv_heads() -> None:
    shared = draw(1, 60, seed=1, index_n_heads=1)
    shared.accept(ours(shared, shared.ids))


def test_a_layer_by_itself_takes_positions_alone(drawn: Drawn) -> None:
    """Without a mask, as a static cache needs it: the last position says how many slots are in use."""
    layer = drawn.model.model.layers[1].self_attn
    hidden = torch.randn(2, 20, drawn.model.config.hidden_size)
    positions = torch.arange(20)[None]
    embeddings = drawn.model.model.rotary_emb(hidden, positions)
    drawn.model.set_attn_implementation("msa_tiles")
    with torch.no_grad():
        whole, _ = layer(hidden, embeddings, None, position_ids=positions)
        cache = CACHES["static"](drawn.model.config)
        parts = []
        for begin, end in ((0, 12), (12, 19), (19, 20)):
            cos, sin = (part[:, begin:end] for part in embeddings)
            out, weights = layer(hidden[:, begin:end], (cos, sin), None, cache, position_ids=positions[:, begin:end])
            assert weights is None
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_the_vision_tower_is_left_to_sdpa() -> None:
    settings = transformers.models.minimax_m3_vl.MiniMaxM3VLVisionConfig(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56
    )
    tower = modeling.MiniMaxM3VLVisionModel._from_config(settings, attn_implementation="sdpa").eval()
    pixels, grid = torch.randn(32, 3 * 2 * 14 * 14), torch.tensor([[1, 4, 4], [1, 4, 4]])
    with torch.no_grad():
        wanted = tower(pixels, grid_thw=grid).last_hidden_state
        tower.set_attn_implementation("msa_tiles")
        assert torch.equal(tower(pixels, grid_thw=grid).last_hidden_state, wanted)


def test_what_is_not_served_is_a_sentence(drawn: Drawn) -> None:
    ids = drawn.ids[:, :20]
    hole = torch.ones(2, 20, dtype=torch.int64)
    hole[1, 5] = 0
    left = torch.ones(2, 20, dtype=torch.int64)
    left[1, :5] = 0
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    for message, given in {
        "padding between the tokens of a row": {"attention_mask": hole},
        "wanted \\[B, Sk\\]": {"attention_mask": torch.ones(2, 20, 1)},
        "takes a 2D mask": {"attention_mask": torch.ones(2, 1, 20, 20)},
        "got 19 slots; wanted 20": {"attention_mask": left[:, 1:], "use_cache": True},
        "packed sequences with a cache": {"position_ids": packed, "use_cache": True},
        "packed sequences beside an attention_mask": {"position_ids": packed, "attention_mask": left},
    }.items():
        with pytest.raises(ValueError, match=message):
            ours(drawn, ids, **given)
    layer = drawn.model.model.layers[1].self_attn
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    for error, message, given in (
        (ValueError, "attention_dropout: got 0.1", {"dropout": 0.1}),
        (ValueError, "output_attentions", {"output_attentions": True}),
        (ValueError, "index_n_heads: got 3", {"block_indices": compat.Indexed(torch.randn(1, 3, 3, 16), k[:, :1])}),
    ):
        with pytest.raises(error, match=message):
            compat.attention(layer, q, k, k, None, **given)
    with pytest.raises(TypeError, match="load the model in torch"):
        compat.attention(layer, q.half(), k.half(), k.half(), None)
    with pytest.raises(ValueError, match="another mask"):
        compat.slots_of(1, 3, 3, local_size=2)


def test_register_is_undone_and_may_be_repeated() -> None:
    indexer = modeling.MiniMaxM3VLIndexer
    ours_now = indexer.forward
    with compat.register():  # the fixture registered already
        assert indexer.forward is ours_now
    assert indexer.forward is ours_now
    compat.unregister()
    original = indexer.forward
    assert original is not ours_now and "msa_tiles" not in transformers.AttentionInterface()
    model = small_model()
    with pytest.raises(ValueError, match="msa_tiles"):
        model.set_attn_implementation("msa_tiles")
    compat.unregister()
    with compat.register():
        model.set_attn_implementation("msa_tiles")
        assert indexer.forward is not original
    assert indexer.forward is original
    compat.register()


def test_another_indexer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.unregister()
    monkeypatch.setattr(modeling.MiniMaxM3VLIndexer, "forward", lambda self, hidden_states, mask: None)
    with pytest.raises(ImportError, match=r"takes \(hidden_states, mask\); wanted"):
        compat.register()


def test_other_implementations_stay_as_they_are(drawn: Drawn) -> None:
    compat.unregister()
    before = drawn.eager(drawn.ids)
    compat.register()
    assert torch.equal(drawn.eager(drawn.ids), before)


@pytest.mark.slow
def test_bfloat16_errs_as_much_as_eager() -> None:
    """What runs on a GPU in tests/gpu, on the reference."""
    drawn = Bfloat16.draw("cpu", 300)
    drawn.check_prefill()
    drawn.check_decode("dynamic", 280)
    drawn.check_decode("static", 280)
    drawn.check_decode("dynamic", 290, batch=1)
    drawn.check_padding((150, 290), 3)
    drawn.check_packed(200)
    drawn.check_training(200)
