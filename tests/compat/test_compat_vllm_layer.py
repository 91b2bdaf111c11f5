"""The plugin in vLLM's own layer: chosen, and right for every kind of step, with vLLM's own metadata.

Needs vLLM's files: `MSA_TILES_VLLM_FILES` names a wheel or a directory with the package, or it is installed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from compat.m3 import DIM, FP8, HEADS, PAGE, Batch, Parameters, drawn
from compat.stand_ins import source_of
from compat.vllm_layer import LAYER, REGISTRY, Layer, vllm_files
from rounding import close, softmax_terms

from msa_tiles import ops
from msa_tiles.compat import notes, plugins, vllm
from msa_tiles.runtime import NoKernelError

SCALE = DIM**-0.5
# Requests of (queries, keys in front of them); how many drafts a decode step verifies; requests that pad the batch.
STEPS = {
    "prefill": ([(130, 0), (1, 300), (7, 250)], 0, 0),
    "decode": ([(1, 300), (1, 0), (1, 129)], 0, 0),
    "padded decode": ([(1, 300), (1, 127)], 0, 2),
    "drafts": ([(4, 300), (4, 0), (4, 200)], 3, 0),
    "padded drafts": ([(4, 300)], 3, 3),
    "mixed": ([(1, 400), (1, 5), (20, 100), (3, 0)], 0, 0),
    "mixed drafts": ([(3, 400), (3, 5), (1, 100), (9, 200)], 2, 0),
}


@pytest.fixture(scope="module")
def state():
    with vllm_files(source_of("vllm", "MSA_TILES_VLLM_FILES")) as found:
        yield found


@pytest.fixture
def model(state, monkeypatch):
    """Our layers, in a process that has logged and refused nothing yet."""
    monkeypatch.setattr(notes, "_SAID", set())
    monkeypatch.setattr(notes, "_KINDS", {})
    monkeypatch.setattr(state, "cuda", True)
    importlib.import_module("msa_tiles.compat.vllm.model")
    return importlib.import_module("msa_tiles.compat.vllm.layers")


@pytest.fixture
def calls(monkeypatch):
    """How often each operator of ours is called."""
    counted = Counter()
    for name in ("select_blocks", "sparse_attention", "msa_decode", "decode_score", "decode_topk", "sparse_decode"):
        count(monkeypatch, ops, name, getattr(ops, name), counted)
    return counted


def count(monkeypatch, module, name, function, counted):
    def wrapper(*given, **named):
        counted[name] += 1
        return function(*given, **named)

    monkeypatch.setattr(module, name, wrapper)


@pytest.fixture
def originals(model, monkeypatch):
    """How often vLLM's operators are called, which run on no CPU: functions of ours by their names stand in."""
    counted = Counter()
    for module in ("indexer", "sparse_attention"):
        module = importlib.import_module(f"vllm.models.minimax_m3.common.{module}")
        for name in vllm.__all__:
            if hasattr(module, name):
                count(monkeypatch, module, name, getattr(vllm, name), counted)
    return counted


def batch_of(name, step, dtype=torch.bfloat16, index_dtype=torch.bfloat16):
    draw = drawn(f"{name} {step} {dtype} {index_dtype}")
    requests, drafts, padded = STEPS[step]
    count = requests[0][0]
    queries = [queries for queries, _ in requests] + [count] * padded
    lengths = [queries + prefix for queries, prefix in requests] + [0] * padded
    width = draw.choice([37, 65, 8192])
    batch = Batch(draw, HEADS[draw.choice([4, 8])], queries, lengths, width, dtype=dtype, index_dtype=index_dtype)
    return batch, Parameters.draw(draw), drafts, padded


def check(layer, out):
    batch = layer.batch
    want = batch.selections(layer.given)
    assert torch.equal(layer.ids.sort(-1)[0], want.sort(-1)[0])
    attended, logit = batch.attention(want, SCALE)
    most = float(batch.cache[..., DIM:].float().nan_to_num().abs().max())
    terms = softmax_terms(max(batch.lengths), DIM, logit)
    close(out, attended.to(out.dtype), terms=terms, size=most, roundings=2)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(torch.bfloat16, torch.bfloat16), (FP8, FP8), (FP8, torch.bfloat16)]
)
def test_a_layer(state, model, calls, originals, step, dtype, index_dtype):
    batch, given, drafts, padded = batch_of("layer", step, dtype, index_dtype)
    layer = Layer(state, batch, given, drafts=drafts)
    # A graph of a full step is captured with the bound of the model.
    out = layer.forward(padded, most=None if "prefill" in step else batch.width * 128)
    check(layer, out)
    parts = {part for part in ("prefill", "mixed") if part in step} or {"decode"}
    wanted = {"msa_decode"} if parts != {"prefill"} else set()
    wanted |= {"select_blocks", "sparse_attention"} if parts != {"decode"} else set()
    assert set(calls) == wanted and not originals
    assert layer.layer.indexer.impl.deferred is None and layer.layer.indexer.impl.index_query is None


def test_our_classes_are_chosen(state, model, caplog):
    with caplog.at_level(logging.INFO, logger="vllm.msa_tiles"):
        for _ in range(2):
            layer = Layer(state, *batch_of("chosen", "decode")[:2]).layer
    assert type(layer.impl) is model.SparseImpl and type(layer.indexer.impl) is model.IndexerImpl
    attention = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
    assert layer.get_attn_backend() is attention.MiniMaxM3SparseBackend
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("msa_tiles serves MiniMax M3's" in text for text in said)
    models = importlib.import_module("vllm.models.minimax_m3")
    ours = importlib.import_module("msa_tiles.compat.vllm.model")
    assert set(models.__all__) == set(ours.__all__)
    assert all(getattr(ours, name) is getattr(models, name) for name in ours.__all__)


def test_vllms_registry_finds_our_module(state, model, monkeypatch):
    """By name, until a model is loaded; then it is vLLM's class, out of our module. Other models are as they were."""
    monkeypatch.delenv("MSA_TILES_VLLM", raising=False)
    registry = importlib.import_module(REGISTRY).ModelRegistry
    before = dict(registry.models)
    plugins.vllm()
    changed = {name for name, found in registry.models.items() if found is not before[name]}
    assert changed == {*plugins.VLLM_MODELS} and registry.models.keys() == before.keys()
    models = importlib.import_module("vllm.models.minimax_m3")
    for name in plugins.VLLM_MODELS:
        entry = registry.models[name]
        assert (entry.module_name, entry.class_name) == ("msa_tiles.compat.vllm.model", name)
        assert entry.load_model_cls() is getattr(models, name)


@pytest.mark.parametrize(
    ("change", "named", "reason"),
    [
        (lambda patch, state: patch.setattr(state, "cuda", False), {}, "the platform is not CUDA"),
        (
            lambda patch, state: patch.setattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", True),
            {},
            "VLLM_BATCH_INVARIANT is set, and there are drafts",
        ),
        (lambda patch, state: None, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is fp8_e5m2"),
    ],
    ids=["platform", "batch invariance", "e5m2"],
)
def test_what_is_left_to_vllm(state, model, monkeypatch, caplog, change, named, reason):
    change(monkeypatch, state)
    attention = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
    indexer = importlib.import_module("vllm.models.minimax_m3.common.indexer")
    asked = {"topk_blocks": 16, "kv_cache_dtype": "auto", "num_kv_heads": 1} | named
    with caplog.at_level(logging.INFO, logger="vllm.msa_tiles"):
        Layer(state, *batch_of("left", "drafts")[:2], drafts=3)  # sets the configuration
        chosen = attention.select_main_backend_and_impl_cls(**asked)
        assert chosen == (attention.MiniMaxM3SparseBackend, attention.MiniMaxM3SparseTritonImpl)
        selector = indexer.select_indexer_impl_cls(topk_blocks=16, indexer_kv_dtype="bf16")
        assert selector is (model.IndexerImpl if named else indexer.MiniMaxM3IndexerTritonImpl)
    assert f"leaves MiniMax M3's attention to vLLM ({said(asked)}): {reason}" in caplog.text


def test_batch_invariance(state, model, calls, monkeypatch):
    """Operators are called as batch invariant, decode with a bound that is no batch's, and a row alone has its bits."""
    monkeypatch.setattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", True)
    named = []

    def keep(call, *given, **options):
        named.append((call, options["batch_invariant"], options["max_seqlen_k"]))
        return call(*given, **options)

    for name in ("msa_decode", "sparse_attention"):
        monkeypatch.setattr(ops, name, functools.partial(keep, getattr(ops, name)))
    batch, given, *_ = batch_of("invariant", "mixed")
    layer = Layer(state, batch, given)
    out = layer.forward()
    check(layer, out)
    assert set(calls) == {"select_blocks", "msa_decode", "sparse_attention"}
    assert [invariant for _, invariant, _ in named] == [True, True]
    assert named[0][2] == batch.width * PAGE
    first = Batch.__new__(Batch)
    first.__dict__.update(vars(batch))
    first.queries, first.lengths, first.ends = batch.queries[:1], batch.lengths[:1], batch.ends[:1]
    first.q, first.idx_q, first.seq_lens = batch.q[:1], batch.idx_q[:1], batch.seq_lens[:1]
    first.table = batch.table[:1]
    assert torch.equal(Layer(state, first, given).forward()[0], out[0])

    def unshared(*given, batch_invariant, **options):
        named.append(batch_invariant)
        return own(*given, batch_invariant=batch_invariant, **options)

    own = ops.sparse_decode
    monkeypatch.setattr(ops, "sparse_decode", unshared)
    layer = Layer(state, batch, given, shared_table=False)
    check(layer, layer.forward())
    assert True in named


def said(named):
    return ", ".join(f"{name}={value}" for name, value in named.items())


def test_other_implementations_stay(state, model, monkeypatch):
    """What vLLM chooses on other GPUs is not replaced."""
    other = type("MSA", (), {})
    monkeypatch.setattr(model, "_MAIN", lambda **named: ("backend", other))
    monkeypatch.setattr(model, "_INDEXER", lambda **named: other)
    assert model.select_main_backend_and_impl_cls(kv_cache_dtype="auto") == ("backend", other)
    assert model.select_indexer_impl_cls(topk_blocks=16) is other


def test_a_run_that_measures_memory(state, model, calls):
    """There is no metadata, or none by layer, and there are no caches: nothing is computed."""
    batch, given, *_ = batch_of("measured", "decode")
    layer = Layer(state, batch, given)
    query, index_query = batch.q.flatten(1), batch.idx_q.flatten(1)
    for metadata in (None, [{LAYER: None}]):
        state.context = SimpleNamespace(attn_metadata=metadata, slot_mapping={}, no_compile_layers={})
        assert layer.layer.indexer(index_query) == (None, None)
        output = torch.full_like(query, torch.nan)
        assert layer.layer.impl.forward(layer.layer, query, torch.tensor([]), output) is output
        assert output.isnan().all()
        assert not layer.layer(torch.zeros(len(query)), layer.hidden_states()).any()
    assert not calls


@pytest.mark.parametrize("step", ["decode", "mixed drafts"])
def test_caches_on_pages_of_different_numbers(state, model, calls, originals, step):
    """Where each cache has a table of its own, no operator that reads both through one is called."""
    batch, given, drafts, padded = batch_of("tables", step)
    layer = Layer(state, batch, given, drafts=drafts, shared_table=False)
    check(layer, layer.forward(padded))
    assert {"decode_score", "decode_topk", "sparse_decode"} <= set(calls) and "msa_decode" not in calls
    assert not originals


def test_another_attention_finds_the_ids(state, model, calls):
    """An attention that is not ours reads ids from the buffer as soon as the indexer is done."""
    batch, given, *_ = batch_of("other attention", "decode")
    layer = Layer(state, batch, given)
    attention = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
    layer.layer.impl.__class__ = attention.MiniMaxM3SparseTritonImpl
    layer.layer.impl.forward = lambda module, query, cache, output, **named: output.zero_()
    layer.forward()
    assert torch.equal(layer.ids.sort(-1)[0], batch.selections(given).sort(-1)[0])
    assert set(calls) == {"decode_score", "decode_topk"}


REFUSALS = {
    ("decode", "msa_decode"): {"minimax_m3_index_decode": 1, "minimax_m3_sparse_attn_decode": 2},
    ("prefill", "select_blocks"): {"minimax_m3_index_score": 2, "minimax_m3_index_topk": 2},
    ("mixed", "sparse_attention"): {"minimax_m3_sparse_attn_decode": 2, "minimax_m3_sparse_attn": 2},
}


@pytest.mark.parametrize(("step", "operator"), REFUSALS, ids=lambda name: name)
def test_what_no_kernel_serves_is_vllms(state, model, originals, monkeypatch, caplog, step, operator):
    """It is tried once, the log says why, and vLLM's operators run, on ids that vLLM's or ours selected."""
    tried = Counter()

    def refuse(*given, **named):
        raise NoKernelError("no kernel serves this call")

    batch, given, drafts, padded = batch_of("refused", step)
    layer = Layer(state, batch, given, drafts=drafts)
    # Only for the layer: the functions that stand in for vLLM's call operators of ours, too.
    own = SimpleNamespace(**{name: getattr(ops, name) for name in ops.__all__})
    monkeypatch.setattr(model.steps, "ops", own)
    count(monkeypatch, own, operator, refuse, tried)
    for _ in range(2):
        check(layer, layer.forward(padded))
    assert tried == {operator: 1} and originals == REFUSALS[step, operator]
    alike = Layer(state, batch, given, drafts=drafts)
    check(alike, alike.forward(padded))
    assert tried == {operator: 1}, "once for all layers that are alike"
    text = "no kernel serves this call"
    assert [record.levelname for record in caplog.records if text in record.getMessage()] == ["WARNING"]


def test_queries_of_another_dtype_are_vllms(state, model, calls, originals, monkeypatch):
    """Attention finds out after the indexer left the step to it: then vLLM's operators select, too."""
    batch, given, *_ = batch_of("dtype", "decode")
    layer = Layer(state, batch, given)
    attention = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
    seen = []

    def forward(self, layer, query, cache, output, query_fp8=None):
        seen.append(query.dtype)
        return output

    monkeypatch.setattr(attention.MiniMaxM3SparseTritonImpl, "forward", forward)
    monkeypatch.setattr(layer, "hidden_states", lambda: Layer.hidden_states(layer).half())
    layer.forward()
    assert seen == [torch.float16] and "msa_decode" not in calls
    assert originals == {"minimax_m3_index_decode": 1}
    assert torch.equal(layer.ids.sort(-1)[0], batch.selections(given).sort(-1)[0])


@pytest.mark.parametrize("name", ["score_type", "block_size"])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_parameters_that_are_not_ours_are_vllms(state, model, originals, step, name):
    """An indexer that scores by another rule, or blocks of another size than pages: its decode step is not deferred."""
    batch, given, drafts, padded = batch_of("parameters", step)
    layer = Layer(state, batch, given, drafts=drafts)
    for part in (layer.layer.indexer.impl, layer.layer.impl):
        if hasattr(part, name):
            setattr(part, name, {"score_type": "lse", "block_size": 64}[name])
    check(layer, layer.forward(padded))
    parts = {"index_decode"} | ({"index_score", "index_topk"} if step == "mixed" else set())
    if name == "block_size":
        parts |= {"sparse_attn_decode"} | ({"sparse_attn"} if step == "mixed" else set())
    assert originals == {f"minimax_m3_{part}": 1 for part in parts}


def test_signatures_are_those_of_this_vllm(state):
    """The functions of `compat.vllm` take what vLLM's take, by the same names and with the same defaults."""
    source = source_of("vllm", "MSA_TILES_VLLM_FILES")
    found = {}
    for module in ("index_topk", "sparse_attn"):
        text, _ = source.read(f"vllm.models.minimax_m3.common.ops.{module}")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("minimax_m3"):
                given = node.args
                assert not (given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg)
                found[node.name] = [argument.arg for argument in given.args], len(given.defaults)
    assert set(found) == set(vllm.__all__)
    for name, (arguments, defaults) in found.items():
        ours = inspect.signature(getattr(vllm, name)).parameters.values()
        assert [parameter.name for parameter in ours] == arguments
        assert sum(parameter.default is None for parameter in ours) == defaults
