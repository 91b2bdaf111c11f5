"""SGLang's sparse prefill and decode through our hooks, against a dense oracle; what is not ours goes to SGLang.

Tests with SGLang's own files need them: `MSA_TILES_SGLANG_FILES` names a wheel or a directory with the package, or it
is installed.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from compat.m3 import DIM, FP8, HEADS, PAGE, Batch, Parameters, draw_prefill, drawn
from compat.sglang_files import decode_of, decoding, never, prefill_of, sglang_files
from compat.stand_ins import Hollow, HollowModule, source_of
from rounding import close, softmax_terms

from msa_tiles import ops
from msa_tiles.compat import notes, plugins
from msa_tiles.compat.sglang import forwards, hooks, pools
from msa_tiles.compat.sglang.calls import Decode, Prefill
from msa_tiles.runtime import NoKernelError

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
DRAWS = pytest.mark.parametrize("number", range(4))
SPARSE = plugins.SGLANG_MODULE


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has logged and refused nothing yet."""
    monkeypatch.setattr(notes, "_SAID", set())
    monkeypatch.setattr(hooks, "kinds", notes.Kinds(hooks.log, "MiniMax M3"))
    monkeypatch.setattr(hooks, "shared", forwards.Shared())
    hooks._deterministic.cache_clear()
    hooks._listen.cache_clear()
    yield
    hooks._deterministic.cache_clear()
    hooks._listen.cache_clear()


def scales_of(draw, dtype):
    if dtype != FP8:
        return {}
    return draw.choice([{}, {"k_scale": draw.uniform(0.5, 2), "v_scale": draw.uniform(0.5, 2)}])


def check(batch, given, out, ids, *, scales=None, q_scale=1.0):
    want = batch.selections(given)
    if ids is not None:
        # Ascending in front of -1.
        assert torch.equal(ids, torch.where(want < 0, 1 << 20, want).sort(-1)[0].where(want >= 0, -1))
    scales = [torch.tensor((scales or {}).get(name, 1.0)) for name in ("k_scale", "v_scale")]
    attended, logit = batch.attention(want, DIM**-0.5 * q_scale, *scales)
    most = float(batch.cache[..., DIM:].float().nan_to_num().abs().max() * scales[1])
    terms = softmax_terms(max(batch.lengths), DIM, logit)
    close(out, attended.to(out.dtype), terms=terms, size=most, roundings=2)


@DTYPES
@DRAWS
def test_prefill(number, dtype):
    draw = drawn(f"sglang prefill {number} {dtype}")
    given, batch = Parameters.draw(draw), draw_prefill(draw, dtype=dtype, index_dtype=dtype)
    scales, q_scale = scales_of(draw, dtype), draw.choice([None, 1.25])
    arguments = prefill_of(draw, batch, given, **scales, q_scale=q_scale, sm_scale=draw.choice([None, DIM**-0.5]))
    nothing, out, ids = hooks.prefill(never, **arguments, return_topk_idx=True)
    assert nothing is None and ids.is_contiguous()
    check(batch, given, out, ids, scales=scales, q_scale=q_scale or 1.0)
    # A layer that selects like the one before.
    again = hooks.prefill(never, **arguments, cached_topk_idx=ids)
    assert len(again) == 2 and torch.equal(again[1], out)


@DTYPES
@DRAWS
def test_decode(number, dtype):
    draw = drawn(f"sglang decode {number} {dtype}")
    given, batch = Parameters.draw(draw), decoding(draw, dtype=dtype, index_dtype=dtype)
    scales, published = scales_of(draw, dtype), None
    arguments = decode_of(draw, batch, given, **scales)
    if draw.random() < 0.5:
        published = torch.full((batch.num_kv_heads, len(batch.queries), given.topk), -9, dtype=torch.int32)
    nothing, out = hooks.decode(never, **arguments, topk_out=published)
    assert nothing is None
    check(batch, given, out, None, scales=scales)
    if published is not None:
        assert torch.equal(published.sort(-1)[0], batch.selections(given).sort(-1)[0])
        # The same blocks, merged in another number of splits.
        _, again = hooks.decode(never, **arguments, cached_topk_idx=published)
        check(batch, given, again, None, scales=scales)


def test_pools_are_views():
    pool = torch.zeros(2, 5 * PAGE + 7, 3, DIM)[1]
    pages = pools.of_heads(pool, PAGE)
    assert pages.shape == (5, 3, PAGE, DIM) and pages.data_ptr() == pool.data_ptr()
    assert pages.stride() == (PAGE * 3 * DIM, DIM, 3 * DIM, 1)
    index = pool[:, :1]
    assert (
        pools.of_index(index, PAGE).shape == (5, PAGE, DIM)
        and pools.of_index(index, PAGE).data_ptr() == pool.data_ptr()
    )


@pytest.mark.parametrize("page", [64, 32])
def test_pages_that_divide_a_block(page):
    draw = drawn("pages")
    given, batch = Parameters(4, 0, 1), decoding(draw)
    _, out = hooks.decode(never, **decode_of(draw, batch, given, page_size=page))
    check(batch, given, out, None)


@pytest.fixture
def tables(monkeypatch):
    """How many tables of pages were made."""
    made = []

    def table(*given):
        made.append(given)
        return own(*given)

    own = pools.table
    monkeypatch.setattr(pools, "table", table)
    return made


def layers_of(batch, arguments, count=3):
    """The arguments of several layers: of each other pools, of all the same tensors that say where."""
    return [arguments | {"k_cache": arguments["k_cache"].clone()} for _ in range(count)]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_layers_of_a_forward_share_their_tables(tables, kind):
    draw, given = drawn(f"shared {kind}"), Parameters(4, 0, 1)
    batch = decoding(draw)
    layers = layers_of(batch, (prefill_of if kind == "prefill" else decode_of)(draw, batch, given))

    def forward():
        before = len(tables)
        for arguments in layers:
            check(batch, given, getattr(hooks, kind)(never, **arguments)[1], None)
        return len(tables) - before

    assert forward() == len(layers), "nobody told that a forward began"
    hooks.shared.begin("a backend", in_capture=True)
    assert forward() == 1
    assert forward() == 1, "the first layer came again"
    layers[1]["seq_lens"] = layers[1]["seq_lens"].clone()
    assert forward() == 3, "other tensors, and again the first ones"


def test_lengths_that_grow_in_place_are_read_again(tables):
    """A step of drafts may add to the same tensors: its first layer has been there before."""
    draw, given = drawn("grown"), Parameters(4, 0, 1)
    batch = Batch(draw, HEADS[8], [1, 1], [300, 128], 37)
    arguments = decode_of(draw, batch, given, max_seqlen=300) | {"seq_lens": torch.tensor([299, 127])}
    hooks.shared.begin()
    hooks.decode(never, **arguments)
    arguments["seq_lens"] += 1
    check(batch, given, hooks.decode(never, **arguments)[1], None)
    assert len(tables) == 2


def test_a_graph_shares_nothing_with_what_ran_before(tables, monkeypatch):
    """What a graph records has to be made in it."""
    draw, given = drawn("captured"), Parameters(4, 0, 1)
    batch = decoding(draw)
    first, second = layers_of(batch, decode_of(draw, batch, given), 2)
    hooks.shared.begin()
    hooks.decode(never, **first)
    monkeypatch.setattr(hooks.kept, "capturing", lambda device: True)
    hooks.decode(never, **second)
    assert len(tables) == 2


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_batch_of_nobody(kind):
    """As a rank without work has it."""
    draw = drawn("nobody")
    batch = Batch(draw, HEADS[8], [1, 1], [300, 128], 37)
    arguments = (prefill_of if kind == "prefill" else decode_of)(draw, batch, Parameters(4, 0, 1))
    for name in ("q", "idx_q", "slot_ids", "seq_lens", "prefix_lens"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    if kind == "prefill":
        arguments["cu_seqlens"] = arguments["cu_seqlens"][:1]
    assert getattr(hooks, kind)(never, **arguments)[1].shape == (0, 8, DIM)


LEFT = {
    "sink": torch.zeros(8, DIM),
    "idx_sink": torch.zeros(1, DIM),
    "idx_v_cache": torch.zeros(PAGE, 1, DIM),
    "disable_index_value": False,
    "score_type": "lse",
    "use_msa": True,
    "page_size": 256,
    "q": torch.zeros(1, 8, DIM, dtype=torch.float16),
    "k_cache": torch.zeros(PAGE, 1, DIM).to(torch.float8_e5m2),
    "idx_q": torch.zeros(1, 2, DIM, dtype=torch.bfloat16),
    "a_new_argument": 1,
}
PREFILL = LEFT | {"loc_mapping": torch.zeros(1), "block_size_q": 16}
DECODE = LEFT | {
    "dense_main_attn_fn": print,
    "hisparse_swap_in_fn": print,
    "indexer_cp": print,
    "packed_queries": 4,
    "idx_k_cache": torch.zeros(PAGE, 1, DIM).to(FP8),
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [("prefill", {name: value}) for name, value in PREFILL.items()]
    + [("decode", {name: value}) for name, value in DECODE.items()],
    ids=lambda part: part if isinstance(part, str) else next(iter(part)),
)
def test_what_is_left_to_sglang(kind, change, caplog):
    """The arguments are passed on as they came, and the log says why, once."""
    draw = drawn("left")
    batch = Batch(draw, HEADS[8], [1, 1], [300, 128], 37)
    made = prefill_of if kind == "prefill" else decode_of
    arguments = made(draw, batch, Parameters(4, 0, 1)) | change
    seen = []

    def original(*given, **named):
        seen.append((given, named))
        return "SGLang's"

    with caplog.at_level(logging.INFO, logger="sglang.msa_tiles"):
        for _ in range(2):
            assert getattr(hooks, kind)(
                original, arguments["q"], **{k: v for k, v in arguments.items() if k != "q"}
            ) == ("SGLang's")
    assert all(given == (arguments["q"],) and named.keys() == arguments.keys() - {"q"} for given, named in seen)
    assert len(seen) == 2 and len(caplog.records) == 1
    assert f"leaves {kind} of MiniMax M3 to SGLang" in caplog.text


def test_deterministic_inference_is_sglangs(monkeypatch, caplog):
    draw = drawn("deterministic")
    context = SimpleNamespace(
        get_exec=lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace(__path__=[]))
    with caplog.at_level(logging.INFO, logger="sglang.msa_tiles"):
        assert (
            hooks.decode(lambda **named: "SGLang's", **decode_of(draw, decoding(draw), Parameters(4, 0, 1)))
            == "SGLang's"
        )
    assert "SGLang is to be deterministic" in caplog.text


def test_what_no_kernel_serves_is_sglangs(monkeypatch, caplog):
    draw = drawn("refused")
    arguments = decode_of(draw, decoding(draw), Parameters(4, 0, 1))
    tried = Counter()

    def refuse(*given, **named):
        tried["msa_decode"] += 1
        raise NoKernelError("no kernel serves this call")

    monkeypatch.setattr(ops, "msa_decode", refuse)
    for _ in range(2):
        assert hooks.decode(lambda **named: "SGLang's", **arguments) == "SGLang's"
    assert tried["msa_decode"] == 1 and [record.levelname for record in caplog.records] == ["WARNING"]


def test_kernels_are_compiled_with_the_first_call(monkeypatch):
    """Those of prefill, too, and not again."""
    asked = []
    monkeypatch.setattr(hooks.warm, "ahead", lambda log, calls: asked.extend(calls))
    hooks._ahead.cache_clear()
    draw = drawn("ahead")
    batch = Batch(draw, HEADS[8], [1, 1], [300, 128], 37, dtype=FP8, index_dtype=FP8)
    for _ in range(2):
        hooks.decode(never, **decode_of(draw, batch, Parameters(16, 0, 1)))
    hooks._ahead.cache_clear()
    assert [call.partition(",")[0] for call in asked] == [
        *("select_blocks", "decode_score", "decode_topk", "sparse_attention", "sparse_decode")
    ]
    assert "q8k8" in asked[0] and "topk=16" in asked[0] and "q16kv8,group=8" in asked[3].replace("precision=", "")


def test_wrong_arguments_are_named():
    draw = drawn("wrong")
    batch = decoding(draw)
    wrong = torch.zeros(batch.num_kv_heads, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^topk_out: got shape .*; wanted \["):
        hooks.decode(never, **decode_of(draw, batch, Parameters(4, 0, 1), topk_out=wrong))


@pytest.fixture(scope="module")
def files():
    return source_of("sglang", "MSA_TILES_SGLANG_FILES")


@pytest.fixture
def sglang(files):
    """SGLang's module of these functions, its Triton kernels hollow, and its registry of hooks."""
    with sglang_files(files) as found:
        yield found


def test_the_plugin_wraps_sglangs_functions(sglang, caplog, monkeypatch):
    """What imported them before is wrapped, too; a call that is not ours still reaches SGLang's own function."""
    monkeypatch.delenv("MSA_TILES_SGLANG", raising=False)
    before = sglang.sparse.minimax_sparse_decode
    plugins.sglang()
    sglang.registry.apply_hooks()
    sglang.registry.apply_hooks()
    assert sglang.sparse.minimax_sparse_decode.__wrapped__ is before
    draw = drawn("plugin")
    given = Parameters(4, 1, 2)
    with caplog.at_level(logging.INFO, logger="sglang.msa_tiles"):
        batch = decoding(draw)
        arguments = decode_of(draw, batch, given)
        for _ in range(2):
            check(batch, given, sglang.sparse.minimax_sparse_decode(**arguments)[1], None)
        batch = draw_prefill(draw)
        check(batch, given, sglang.sparse.minimax_sparse_prefill(**prefill_of(draw, batch, given))[1], None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[0].startswith("msa_tiles serves MiniMax M3's decode (")

    ids = torch.zeros(1, 1, 4, dtype=torch.int32)
    sglang.sparse.flash_decode_with_topk_idx = lambda **named: (None, ids, None)
    sglang.sparse.flash_decode_with_gqa_share_sparse = lambda **named: named["topk_idx"]
    assert sglang.sparse.minimax_sparse_decode(**arguments | {"sink": torch.zeros(1)}) == (None, ids)


def test_sglangs_backend_tells_when_a_forward_begins(sglang, tables, monkeypatch):
    """Its class is hooked with the first call, which comes after its module was loaded."""
    calls = []

    class MiniMaxSparseAttnBackend:
        def init_forward_metadata_out_graph(self, batch, in_capture=False):
            calls.append((batch, in_capture))

        def init_forward_metadata_in_graph(self, batch):
            calls.append(batch)

    backend = ModuleType(forwards.BACKEND)
    backend.MiniMaxSparseAttnBackend = MiniMaxSparseAttnBackend
    monkeypatch.setitem(sys.modules, forwards.BACKEND, backend)
    draw, given = drawn("told"), Parameters(4, 0, 1)
    batch = decoding(draw)
    layers = layers_of(batch, decode_of(draw, batch, given))
    for begins, made in ((False, 3), (True, 1), (True, 1)):
        if begins:
            MiniMaxSparseAttnBackend().init_forward_metadata_out_graph("batch", in_capture=True)
            MiniMaxSparseAttnBackend().init_forward_metadata_in_graph("batch")
        before = len(tables)
        for arguments in layers:
            hooks.decode(never, **arguments)
        assert len(tables) - before == made
    assert calls == [("batch", True), "batch"] * 2


def test_the_backends_methods_are_there(files):
    text, _ = files.read(forwards.BACKEND)
    [backend] = [node for node in ast.parse(text).body if getattr(node, "name", "") == "MiniMaxSparseAttnBackend"]
    assert {*forwards.PREPARES} <= {node.name for node in backend.body if isinstance(node, ast.FunctionDef)}


def test_index_keys_of_fewer_bits_than_queries(sglang):
    """On Hopper SGLang keeps index keys in e4m3 and queries in BF16: its indexer selects, ours attends."""
    draw = drawn("widened")
    given, batch = Parameters(4, 0, 1), draw_prefill(draw, dtype=FP8, index_dtype=FP8)
    batch.idx_q = batch.idx_q.to(torch.bfloat16)
    arguments = prefill_of(draw, batch, given)
    want, seen = batch.selections(given), {}
    ascending = torch.where(want < 0, 1 << 20, want).sort(-1)[0].where(want >= 0, -1)

    def select(**named):
        seen.update(named)
        return None, ascending

    sglang.sparse.flash_prefill_with_topk_index = select
    _, out, ids = hooks.prefill(sglang.sparse.minimax_sparse_prefill, **arguments, return_topk_idx=True)
    assert ids is ascending
    check(batch, given, out, ids)
    assert seen["q"] is batch.idx_q and seen["k_cache"] is arguments["idx_k_cache"]


def arguments_of(files, module, name):
    text, _ = files.read(module)
    [found] = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    given = found.args
    assert not (given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg)
    names = [argument.arg for argument in given.args]
    defaults = [ast.literal_eval(default) for default in given.defaults]
    return names, dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


@pytest.mark.parametrize("kernels", [False, True])
def test_modules_of_its_files_have_sources(files, kernels, monkeypatch):
    """Triton reads them. Kernels are imported here with a hollow Triton."""
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, HollowModule(name))
    with sglang_files(files, kernels=kernels) as found:
        assert inspect.getsource(found.sparse.minimax_sparse_decode).startswith("def minimax_sparse_decode(")
        assert isinstance(found.sparse.flash_decode_with_topk_idx, Hollow) != kernels


def test_arguments_are_those_of_this_sglang(files):
    for name, ours in (("minimax_sparse_prefill", Prefill), ("minimax_sparse_decode", Decode)):
        names, defaults = arguments_of(files, SPARSE, name)
        assert list(ours._fields) == names and ours._field_defaults == defaults


def test_its_indexer_takes_what_ours_hands_on(files):
    """The names that `hooks` passes to SGLang's indexer are arguments of it."""
    module = "sglang.kernels.ops.attention.minimax_sparse.prefill.flash_with_topk_idx"
    names, _ = arguments_of(files, module, "flash_prefill_with_topk_index")
    [call] = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(hooks)))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "flash_prefill_with_topk_index"
    ]
    handed = {keyword.arg for keyword in call.keywords}
    assert handed <= set(names) and {*names} - handed == {"use_tma", "v_scale"}
