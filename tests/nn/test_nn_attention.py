"""The layer on the CPU: its formula, and which loss moves which parameter."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from rounding import close
from torch import nn
from torch.utils.checkpoint import checkpoint

from msa_tiles.nn import HeadNorm, MiniMaxSparseAttention, rotate

INDEX = ("index_q_proj.weight", "index_k_proj.weight", "index_q_norm.weight", "index_k_norm.weight")
MAIN = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight")
LENGTHS = (11, 0, 21)
TERMS = 1000  # 32 tokens of 20 numbers through two projections, and what scores of about 20 are off by


def layer_of(warmup=False, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {"head_dim": 8, "index_dim": 12, "topk": 2, "block_size": 4, "rotary_dim": 4} | changes
    made = MiniMaxSparseAttention(20, 4, 2, warmup=warmup, dtype=dtype, **sizes)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Weights of the norms start at 0, where a wrong use of them would not be seen.
            parameter.normal_(0.0, 0.3 if "norm" in name else 0.4)
    return made


def packed(lengths=LENGTHS):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def hidden_of(total=32, dtype=torch.float32, seed=1):
    return torch.randn(total, 20, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)


def turned(x, position):
    """Four of the dimensions of x [D] as two complex numbers, turned."""
    angles = position * torch.tensor([1.0, 5_000_000.0**-0.5], dtype=x.dtype)
    pairs = torch.complex(x[:2], x[2:4]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag, x[4:]])


def by_hand(layer, hidden, sparse):
    """One sequence, query by query: (output, loss), with the same stop-gradients as the paper's."""
    total = hidden.shape[0]

    def project(source, projection, weight, heads, dim):
        x = norm((source @ projection.weight.T).view(total, heads, dim), weight.weight)
        return [[turned(x[t, h], t) for h in range(heads)] for t in range(total)]

    q = project(hidden, layer.q_proj, layer.q_norm, 4, 8)
    k = project(hidden, layer.k_proj, layer.k_norm, 2, 8)
    v = (hidden @ layer.v_proj.weight.T).view(total, 2, 8)
    idx_q = project(hidden.detach(), layer.index_q_proj, layer.index_q_norm, 2, 12)
    idx_k = project(hidden.detach(), layer.index_k_proj, layer.index_k_norm, 1, 12)
    rows, loss = [], torch.zeros((), dtype=hidden.dtype)
    for t in range(total):
        heads = []
        for group in range(2):
            index = torch.stack([idx_q[t][group] @ idx_k[j][0] for j in range(t + 1)])
            blocks = [index[b : b + 4].max().item() for b in range(0, t + 1, 4)]
            best = [*sorted(range(len(blocks) - 1), key=lambda b: -blocks[b])[:1], len(blocks) - 1]
            seen = [j for j in range(t + 1) if not sparse or j // 4 in best]
            keys = torch.stack([k[j][group] for j in seen])
            teacher = []
            for head in (2 * group, 2 * group + 1):
                weights = (keys @ q[t][head] / math.sqrt(8)).softmax(0)
                heads.append(weights @ v[seen, group])
                teacher.append(weights.detach())
            mean = torch.stack(teacher).mean(0)
            student = (index[seen] / math.sqrt(12)).log_softmax(0)
            loss = loss + (mean * (mean.log() - student)).sum() / (2 * total)
        rows.append(layer.o_proj(torch.cat(heads)))
    return torch.stack(rows), loss


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_the_layer_is_its_formula(warmup):
    layer, hidden = layer_of(warmup, torch.float64), hidden_of(19, torch.float64).requires_grad_()
    wanted, wanted_kl = by_hand(layer, hidden, sparse=not warmup)
    out, kl, ids = layer(hidden, return_block_indices=True)
    # The LSE between attention and the divergence is float32.
    close(out, wanted, terms=TERMS)
    close(kl, wanted_kl, terms=TERMS, dtype=torch.float32)
    assert ids.shape == (2, 19, 2)
    names = ["hidden", *dict(layer.named_parameters())]
    leaves = [hidden, *layer.parameters()]
    for one, other in ((out.square().sum(), wanted.square().sum()), (kl, wanted_kl)):
        pairs = zip(names, *(torch.autograd.grad(x, leaves, allow_unused=True) for x in (one, other)), strict=True)
        for name, found, want in pairs:
            assert (found is None) == (want is None), name
            if found is not None:
                try:
                    close(found, want, terms=TERMS, dtype=torch.float32)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_each_loss_moves_its_own_branch(warmup):
    """The divergence reaches neither the layer's input nor any main parameter, the output all others."""
    layer, hidden = layer_of(warmup), hidden_of().requires_grad_()
    layer(hidden, cu_seqlens=packed()).kl.backward()
    moved = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert moved == set(INDEX) and hidden.grad is None
    assert all(layer.get_parameter(name).grad.abs().max() > 1e-6 for name in INDEX)
    layer.zero_grad()
    layer(hidden, cu_seqlens=packed()).hidden.square().sum().backward()
    moved = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert moved == set(MAIN) and hidden.grad.abs().max() > 1e-6
    assert {name for name, _ in layer.named_parameters()} == set(INDEX) | set(MAIN)


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_packed_sequences_are_sequences_of_their_own(warmup):
    layer, hidden = layer_of(warmup), hidden_of()
    whole = layer(hidden, cu_seqlens=packed(), max_seqlen=21, return_block_indices=True)
    first, last = layer(hidden[:11], return_block_indices=True), layer(hidden[11:], return_block_indices=True)
    close(whole.hidden, torch.cat([first.hidden, last.hidden]), terms=TERMS)
    close(whole.kl, (11 * first.kl + 21 * last.kl) / 32, terms=TERMS)
    assert torch.equal(whole.block_indices, torch.cat([first.block_indices, last.block_indices], 1))


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_rows_behind_the_last_sequence_are_padding(warmup):
    """They give 0 and add nothing, but count in the mean of the loss, which weights mend."""
    layer, hidden = layer_of(warmup), hidden_of()
    wanted = layer(hidden[:24], cu_seqlens=packed((11, 13)))
    padded = hidden.clone()
    padded[24:] = torch.nan
    found = layer(padded, cu_seqlens=packed((11, 13)))
    close(found.hidden[:24], wanted.hidden, terms=TERMS)
    assert not found.hidden[24:].any()
    close(found.kl, wanted.kl * 24 / 32, terms=TERMS)
    weights = torch.zeros(32)
    weights[:24] = 32 / 24
    close(layer(padded, cu_seqlens=packed((11, 13)), token_weights=weights).kl, wanted.kl, terms=TERMS)


def test_a_batch_is_packed_sequences():
    layer, hidden = layer_of(), hidden_of(30)
    weights = torch.rand(30)
    wanted = layer(hidden, cu_seqlens=packed((10, 10, 10)), token_weights=weights)
    found = layer(hidden.view(3, 10, 20), token_weights=weights.view(3, 10))
    close(found.hidden, wanted.hidden.view(3, 10, 20), terms=TERMS)
    close(found.kl, wanted.kl, terms=TERMS)


def test_the_divergence_is_for_training():
    layer, hidden = layer_of(), hidden_of()
    assert layer(hidden).kl is not None and layer(hidden).block_indices is None
    assert layer(hidden, return_kl=False).kl is None
    layer.eval()
    for warmup in (False, True):
        layer.warmup = warmup
        assert layer(hidden).kl is None and layer(hidden, return_kl=True).kl is not None


def test_the_switch_changes_attention_and_not_the_selection():
    layer, hidden = layer_of(), hidden_of()
    sparse = layer(hidden, return_block_indices=True)
    layer.warmup = True
    dense = layer(hidden, return_block_indices=True)
    assert torch.equal(sparse.block_indices, dense.block_indices)
    close(sparse.hidden[:8], dense.hidden[:8], terms=TERMS)
    assert (sparse.hidden[12:] - dense.hidden[12:]).abs().max() > 1e-3


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.drawn(1)
def test_compiled_checkpointed_and_under_autocast(warmup):
    layer = layer_of(warmup)

    def selected(x, cast):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            return layer(x, cu_seqlens=packed(), return_block_indices=True).block_indices

    # Where two blocks score alike, rounding turns the choice, and gradients are those of another block: one draw in 16.
    draws = (hidden_of(seed=seed) for seed in range(1, 9))
    hidden = next(x for x in draws if torch.equal(selected(x, True), selected(x, False)))

    def gradients(run):
        layer.zero_grad()
        out, kl, _ = run(hidden)
        (out.float().square().sum() + kl).backward()
        return {name: parameter.grad for name, parameter in layer.named_parameters()}

    def plain(x):
        return layer(x, cu_seqlens=packed())

    def cast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(x)

    wanted = gradients(plain)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(plain, fullgraph=True, backend="aot_eager"))
    replayed = gradients(lambda x: checkpoint(plain, x, use_reentrant=False))
    rounded = gradients(cast)
    for name, want in wanted.items():
        close(compiled[name], want, terms=TERMS)
        torch.testing.assert_close(replayed[name], want, rtol=0, atol=0)
        assert rounded[name].dtype == torch.float32
        # Scores of about 20, rounded to eight bits, are off by 0.08, weights by as much of themselves.
        assert torch.cosine_similarity(rounded[name].flatten(), want.flatten(), dim=0) > 0.99, name


def test_the_example_of_the_readme_runs_and_does_what_its_comments_say(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the GPU here may be one without kernels
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    (example,) = (block for block in re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL) if "layer" in block)
    example = example.replace("(2, 700, 512", "(2, 150, 512")
    names: dict = {}
    exec(compile(first[: first.index("def random")] + example, "README.md", "exec"), names)
    layer = names["layer"]
    assert not layer.warmup and names["out"].shape == (2, 150, 512) and names["kl"].dtype == torch.float32
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_norm_and_rotation():
    x = torch.randn(7, 3, 10, generator=torch.Generator().manual_seed(2))
    head_norm = HeadNorm(10)
    # Of a head of 10 elements around 1: the norm adds its epsilon to their mean square.
    close(head_norm(x).square().mean(-1), torch.ones(7, 3), terms=TERMS)
    nn.init.constant_(head_norm.weight, 1.0)
    close(head_norm(x), 2 * norm(x, torch.zeros(10)), terms=TERMS)
    assert head_norm(x.bfloat16()).dtype == torch.bfloat16
    positions = torch.arange(7)
    rotated = rotate(x, positions, 6, 100.0)
    assert torch.equal(rotated[..., 6:], x[..., 6:]) and torch.equal(rotated[0], x[0])
    close(rotated.norm(dim=-1), x.norm(dim=-1), terms=TERMS)
    assert rotate(x, positions, 0, 100.0) is x
    # Products depend on differences of positions alone.
    here, there = (rotate(x[:2], torch.tensor(at), 6, 100.0) for at in ([3, 8], [1003, 1008]))
    # An angle of 1008 radians is off by 1008 roundings, and the products of 10 elements of up to 4 with it.
    close((here[0] * here[1]).sum(-1), (there[0] * there[1]).sum(-1), terms=4 * 1008, size=10 * 4.0**2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk: got 0; wanted at least 1"),
        ({"rotary_dim": 3}, "rotary_dim: got 3; wanted an even number up to 8"),
        ({"rotary_dim": 10}, "rotary_dim: got 10; wanted an even number up to 8"),
        ({"rope_base": -1}, "rope_base: got -1; wanted a finite number above 0"),
        ({"rope_base": float("inf")}, "rope_base: got inf; wanted a finite number above 0"),
        ({"norm_eps": -10.0}, "norm_eps: got -10.0; wanted a finite number above 0"),
        ({"norm_eps": float("nan")}, "norm_eps: got nan; wanted a finite number above 0"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        layer_of(**change)


@pytest.mark.parametrize("name", ["hidden_size", "topk", "block_size", "init_blocks", "rotary_dim"])
@pytest.mark.parametrize("wrong", [2.5, "4", True, -1])
def test_sizes_are_integers(name, wrong):
    sizes = {"hidden_size": 20, "num_q_heads": 4, "num_kv_heads": 2} | {name: wrong}
    with pytest.raises(ValueError if wrong == -1 else TypeError, match=f"^{name}: got "):
        MiniMaxSparseAttention(**sizes)


@pytest.mark.parametrize("name", ["rope_base", "norm_eps"])
@pytest.mark.parametrize("wrong", ["4", True, None])
def test_numbers_are_numbers(name, wrong):
    with pytest.raises(TypeError, match=f"^{name}: got {type(wrong).__name__}; wanted a number$"):
        layer_of(**{name: wrong})


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.parametrize("shape", [(0, 20), (0, 3, 20), (2, 0, 20)])
def test_no_tokens(shape, warmup):
    """A rank may have none: it still takes part in the backward pass."""
    layer = layer_of(warmup)
    out, kl, _ = layer(torch.zeros(shape))
    (out.sum() + kl).backward()
    assert out.shape == shape and kl == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


def test_wrong_calls():
    with pytest.raises(ValueError, match="num_q_heads: got 3; wanted a multiple of the 2 KV heads"):
        MiniMaxSparseAttention(20, 3, 2)
    layer = layer_of()
    with pytest.raises(ValueError, match=r"hidden: got 1 dimensions; wanted \[T, hidden_size\]"):
        layer(torch.zeros(20))
    with pytest.raises(ValueError, match=r"cu_seqlens: got a tensor beside hidden \[B, S, hidden_size\]"):
        layer(torch.zeros(2, 3, 20), cu_seqlens=packed((3, 3)))
    with pytest.raises(ValueError, match="token_weights: got shape"):
        layer(torch.zeros(6, 20), token_weights=torch.ones(5))
    with pytest.raises(ValueError, match=r"^token_weights: got shape \[3, 2\]; wanted \[B, S\] = \[2, 3\]"):
        layer(torch.zeros(2, 3, 20), token_weights=torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^hidden: got hidden size 19; wanted 20"):
        layer(torch.zeros(6, 19))
    for wrong in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        message = f"^hidden: got dtype {wrong}; wanted torch.float32 like the layer's weights, or a call under torch"
        with pytest.raises(TypeError, match=message):
            layer(torch.zeros(6, 20, dtype=wrong))
        with pytest.raises(TypeError, match=message):
            layer.queries_and_keys(torch.zeros(6, 20, dtype=wrong))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.zeros(6, 20, dtype=torch.bfloat16)).hidden.dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"^hidden: got dtype torch.float64; wanted torch.float32"):
            layer(torch.zeros(6, 20, dtype=torch.float64))
    for kind, wrong in (
        (TypeError, [0, 6]),
        (TypeError, torch.tensor([0, 6])),
        (ValueError, torch.zeros(2, 2, dtype=torch.int32)),
        (ValueError, torch.zeros(0, dtype=torch.int32)),
    ):
        with pytest.raises(kind, match=r"^cu_seqlens: got "):
            layer(torch.zeros(6, 20), cu_seqlens=wrong)
    assert "4 query heads on 2 KV heads, topk=2" in repr(layer)
