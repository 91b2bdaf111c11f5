"""What the operators hand to a kernel fits the host code of the CuTe DSL ones, which checks it before it launches.

There is no GPU here: CPU tensors travel as tensors of device cuda:0. A call whose arguments fit gets as far as asking
for the driver, and one that does not fit is refused before that, with a sentence that names the argument.
"""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor

from msa_tiles import ops, runtime
from msa_tiles.call import backends
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, lookup, places, windows, workspaces
from msa_tiles.quant import FP8, quantize_index_pages, quantize_mxfp4, quantize_nvfp4, vllm_pages
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.compiler import compile_variant
from msa_tiles.runtime.dispatch import fit_variant
from msa_tiles.runtime.launch import load_function
from msa_tiles.runtime.registry import default_registry

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ARCHS = {"sm90": "sm_90a", "sm100": "sm_100a"}
NO_DRIVER = "cudaErrorInsufficientDriver|cudaErrorNoDevice"
# DLPack's (type code, bits).
CODES = {
    torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.int32: (0, 32), torch.uint8: (1, 8), FP8: (10, 8),
    torch.float8_e8m0fnu: (14, 8),
}  # fmt: skip
CUDA = 2  # DLPack's device type
# Integers may begin anywhere. Requests of one, no, four and 125 tokens.
LENGTHS = torch.tensor([-1, 0, 1, 1, 5, 130], dtype=torch.int32)[1:]


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Disguised:
    """A CPU tensor that says it lies on cuda:0."""

    def __init__(self, tensor: Tensor) -> None:
        code, bits = CODES[tensor.dtype]
        rank = tensor.dim()
        extents = ctypes.c_int64 * rank
        self.kept = tensor, extents(*tensor.shape), extents(*tensor.stride())
        shape, strides = (ctypes.addressof(values) for values in self.kept[1:])
        self.managed = DLManagedTensor(DLTensor(tensor.data_ptr(), CUDA, 0, rank, code, bits, 1, shape, strides, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_options: Any) -> object:
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.fixture
def target() -> str:
    """The target whose kernels take the calls; tests of operators that others have too choose among them."""
    return "sm90"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, target: str) -> list[str]:
    """Route CPU tensors to the compiled kernels; the operators whose arguments passed every check."""
    if torch.cuda.is_available():
        pytest.skip("the kernels would run here, on pointers of the CPU")
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    names: list[str] = []

    def find_kernel(op: str, facts: Any, backend: str = "auto", *, helper: bool = False) -> Callable[..., None]:
        cells = default_registry().select(op=op, dsl="cutedsl", target=target, precision=facts.precision)
        if not cells:
            return lambda *_arguments: None
        assert not facts.features - cells[0].features
        variant, misfit = fit_variant(cells[0], facts.variant)
        assert misfit is None
        function = load_function(compile_variant(cells[0], variant, ARCHS[target]))

        def kernel(*arguments: Any) -> None:
            disguised = [Disguised(value) if isinstance(value, Tensor) else value for value in arguments]
            values = [tvm_ffi.from_dlpack(value) if isinstance(value, Disguised) else value for value in disguised]
            with pytest.raises(RuntimeError, match=NO_DRIVER):
                function(*values)
            names.append(op)

        return kernel

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(runtime, "find_kernel", find_kernel)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    return names


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def strided(*shape: int) -> Tensor:
    """Rows of a wider tensor, heads before tokens."""
    tokens, heads, dim = shape
    return normal(heads, tokens, 2 * dim).transpose(0, 1)[..., :dim]


def integers(*shape: int) -> Tensor:
    """A part of a wider tensor that begins 4 bytes behind it."""
    return torch.zeros((*shape[:-1], shape[-1] + 3), dtype=torch.int32)[..., 1 : 1 + shape[-1]]


def flat(make: Callable[..., Tensor], heads: int | None, dim: int) -> dict[str, Any]:
    """One sequence, with nothing but keys."""
    return {"keys": make(130, heads, dim) if heads else make(130, 1, dim)[:, 0]}


def packed(make: Callable[..., Tensor], heads: int | None, dim: int) -> dict[str, Any]:
    """Requests one after another, with what is optional."""
    where = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS, "seqused_k": LENGTHS.diff(), "max_seqlen_k": 125}
    return {**flat(make, heads, dim), **where, "q_positions": integers(130)}


def paged(_make: Callable[..., Tensor], heads: int | None, dim: int) -> dict[str, Any]:
    """Pages of half a block."""
    keys = normal(*((6, heads, 64, dim) if heads else (6, 64, dim)))
    return {"keys": keys, "cu_seqlens_q": LENGTHS, "page_table": integers(4, 3), "seqused_k": LENGTHS.diff()}


TARGETS = pytest.mark.parametrize("target", ARCHS)
PLACES = [(flat, normal), (packed, strided), (paged, strided)]


@pytest.mark.parametrize(("place", "make"), PLACES)
def test_index_score(launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor]) -> None:
    where = place(make, None, 128)
    idx_k = where.pop("keys")
    ops.index_score(make(130, 4, 128), idx_k, **where)
    ops.index_score(make(130, 1, 128), idx_k, layout="token_major", causal=False, **where)
    assert launched == ["index_score"] * 2


@TARGETS
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_select_blocks(launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor]) -> None:
    where = place(make, None, 128)
    idx_k = where.pop("keys")
    ops.select_blocks(make(130, 4, 128), idx_k, 16, **where)
    ops.select_blocks(make(130, 1, 128), idx_k, 13, order="score", init_blocks=1, out=integers(1, 130, 13), **where)
    assert launched == ["select_blocks"] * 2


def as_fp8(tensor: Tensor) -> Tensor:
    """Zeros where the tensor has its elements."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.uint8).zero_().view(FP8)


def scales_of(idx_k: Tensor, key_scales: bool) -> dict[str, Tensor]:
    """Every second one of as many scales as there are keys, and of more heads' and tokens' than there are queries."""
    k_scale = torch.ones(*idx_k.shape[:-1], 2)[..., 1] if key_scales else torch.tensor(0.5)
    return {"q_scale": torch.ones(8, 131).T[1:, ::2], "k_scale": k_scale}


@pytest.mark.parametrize(("place", "make"), PLACES)
@pytest.mark.parametrize("key_scales", [False, True])
@pytest.mark.parametrize("op", ["index_score", "decode_score"])
def test_scores_on_fp8(
    launched: list[str], op: str, place: Callable[..., dict], make: Callable[..., Tensor], key_scales: bool
) -> None:
    where = place(make, None, 128)
    idx_q, idx_k = as_fp8(make(130, 4, 128)), as_fp8(where.pop("keys"))
    scales = scales_of(idx_k, key_scales)
    getattr(ops, op)(idx_q, idx_k, **scales, **where)
    scales["q_scale"] = scales["q_scale"][0] if key_scales else None
    getattr(ops, op)(idx_q, idx_k, layout="token_major", causal=False, **scales, **where)
    assert launched == [op] * 2


@pytest.mark.parametrize(("place", "make"), PLACES)
@pytest.mark.parametrize("key_scales", [False, True])
def test_select_blocks_on_fp8(
    launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor], key_scales: bool
) -> None:
    where = place(make, None, 128)
    idx_k = as_fp8(where.pop("keys"))
    scales = scales_of(idx_k, key_scales)
    ops.select_blocks(as_fp8(make(130, 4, 128)), idx_k, 16, k_scale=scales["k_scale"], **where)
    grouped = {"num_kv_heads": 2, **scales, "out": integers(2, 130, 13)}
    ops.select_blocks(as_fp8(make(130, 4, 128)), idx_k, 13, order="score", init_blocks=1, **grouped, **where)
    assert launched == ["select_blocks"] * 2


@pytest.mark.parametrize("place", [flat, packed])
def test_topk_select(launched: list[str], place: Callable[..., dict]) -> None:
    where = place(normal, None, 128)
    del where["keys"]
    ops.topk_select(torch.zeros(4, 130, 2), 16, **where)
    wide = torch.zeros(130, 4, 7).transpose(0, 1)[..., 1:3]
    ops.topk_select(wide, 5, num_kv_heads=2, order="score", out=integers(2, 130, 5), **where)
    ops.topk_select(wide, 16, num_valid_blocks=integers(130), **where)
    assert launched == ["topk_select"] * 3


@pytest.mark.parametrize(("place", "make"), PLACES)
def test_decode_score(launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor]) -> None:
    where = place(make, None, 128)
    idx_k = where.pop("keys")
    ops.decode_score(make(130, 4, 128), idx_k, **where)
    ops.decode_score(make(130, 3, 128), idx_k, layout="token_major", causal=False, **where)
    assert launched == ["decode_score"] * 2


@pytest.mark.parametrize("place", [flat, packed])
def test_decode_topk(launched: list[str], place: Callable[..., dict]) -> None:
    where = place(normal, None, 128)
    del where["keys"]
    ops.decode_topk(torch.zeros(4, 130, 2), 16, **where)
    wide = torch.zeros(130, 4, 7).transpose(0, 1)[..., 1:3]
    ops.decode_topk(wide, 5, num_kv_heads=2, order="score", out=integers(2, 130, 5), **where)
    ops.decode_topk(wide, 64, num_valid_blocks=integers(130), **where)
    assert launched == ["decode_topk"] * 3


@pytest.mark.parametrize("group", [16, 2])
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_sparse_decode(
    launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor], group: int
) -> None:
    where = place(make, 2, 128)
    k = where.pop("keys")
    ids = integers(2, 130, 3).transpose(0, 1).contiguous().transpose(0, 1)
    ops.sparse_decode(make(130, 2 * group, 128), k, k, ids, **where)
    buffers = {"out": strided(130, 2 * group, 128), "lse": torch.zeros(130, 4 * group)[:, : 2 * group]}
    # With room for no partial result there is one split, which writes into the caller's buffers.
    ops.sparse_decode(make(130, 2 * group, 128), k, k, ids, return_lse=True, workspace=1, **buffers, **where)
    assert launched == ["sparse_decode"] * 2


@pytest.mark.parametrize(
    "op",
    sorted(
        {cell.op for cell in default_registry().select(dsl="cutedsl", precision="q16kv8")}
        & {"sparse_attention", "sparse_decode"}
    ),
)
@pytest.mark.parametrize("per", ["tensor", "head", "token_head"])
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_attention_on_fp8(
    launched: list[str], op: str, place: Callable[..., dict], make: Callable[..., Tensor], per: str
) -> None:
    """e4m3 keys and values under BF16 queries; of the values' scales there are as few as may be."""
    where = place(make, 2, 128)
    k = as_fp8(where.pop("keys"))
    # Every second one of as many as there are, with heads before tokens.
    rows = torch.ones(k.shape[1], k.shape[0], *k.shape[2:-1], 2).transpose(0, 1)[..., 1]
    scales = {"k_scale": {"tensor": torch.tensor(0.5), "head": torch.ones(4)[::2], "token_head": rows}[per]}
    scales["v_scale"] = rows if per == "tensor" else torch.tensor(0.5)
    ids, q = integers(2, 130, 3), make(130, 32, 128)
    getattr(ops, op)(q, k, k, ids, **scales, **where)
    getattr(ops, op)(q, k, k, ids, **scales | {"v_scale": torch.ones(2)}, out=strided(130, 32, 128), **where)
    assert [name for name in launched if name == op] == [op] * 2


@pytest.mark.parametrize(
    ("op", "precision"),
    sorted(
        {
            (c.op, c.precision)
            for c in default_registry().select(dsl="cutedsl")
            if c.precision in ("q16kv4", "q16kvmx4") and c.op in ("sparse_attention", "sparse_decode")
        }
    ),
)
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_attention_on_four_bits(
    launched: list[str], op: str, precision: str, place: Callable[..., dict], make: Callable[..., Tensor]
) -> None:
    """Scales of values in both layouts, keys and values also in the pages of servers, of a pool of several layers."""
    where = place(make, 2, 128)
    quantize = quantize_mxfp4 if "mx" in precision else quantize_nvfp4
    k = quantize(where.pop("keys"))
    ids, q = integers(2, 130, 3), make(130, 32, 128)
    getattr(ops, op)(q, k, k, ids, **where)
    v, paged_keys = k, "page_table" in where
    if paged_keys:
        v = k.with_layout("interleaved")
    if paged_keys and "mx" not in precision:
        _, k, v = vllm_pages(torch.zeros(6, 3, 4, 64, 72, dtype=torch.uint8)[:, 1], torch.tensor(0.5))
    getattr(ops, op)(q, k, v, ids, out=strided(130, 32, 128), **where)
    assert [name for name in launched if name == op] == [op] * 2


@pytest.mark.parametrize("quantize", [quantize_nvfp4, quantize_mxfp4])
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_scores_on_four_bits(
    launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor], quantize: Callable[..., Any]
) -> None:
    """Index keys of 4 bits under BF16 queries, in a step under keys and values of any format; also SGLang's pages."""
    where, of_attention = place(make, None, 128), place(make, 2, 128)
    idx_q, keys = make(130, 4, 128), where.pop("keys")
    idx_k = quantize(keys)
    ops.decode_score(idx_q, idx_k, **where)
    ops.decode_score(as_fp8(idx_q), idx_k, q_scale=torch.ones(4), **where)
    ops.select_blocks(idx_q, idx_k, 3, num_kv_heads=2, **where)
    if keys.dim() == 3 and quantize is quantize_nvfp4:
        idx_k = quantize_index_pages(keys, global_scale=torch.tensor(0.5))[1]
    for score in (ops.decode_score, ops.index_score):
        score(idx_q, idx_k, layout="token_major", causal=False, **where)
    ops.select_blocks(idx_q, idx_k, 16, order="score", **where)
    of_heads = torch.ones(130, 4)
    ops.index_score(as_fp8(idx_q), idx_k, q_scale=of_heads, **where)
    ops.select_blocks(as_fp8(idx_q), idx_k, 16, q_scale=of_heads, **where)
    ops.select_blocks(as_fp8(idx_q), idx_k, 3, num_kv_heads=2, q_scale=of_heads, out=integers(2, 130, 3), **where)
    k = of_attention["keys"]
    for keys_of in (lambda: k, lambda: quantize(k)):
        ops.msa_decode(make(130, 32, 128), keys_of(), keys_of(), idx_q, idx_k, 16, **where)
    ops.msa_decode(make(130, 32, 128), k, k, as_fp8(idx_q), idx_k, 16, **where)
    assert [name for name in launched if name != "combine"] == [
        *["decode_score"] * 2, "select_blocks", "decode_score", "index_score", "select_blocks",
        "index_score", *["select_blocks"] * 2, *["decode_score", "sparse_decode"] * 3,
    ]  # fmt: skip


def test_sparse_decode_in_splits(launched: list[str]) -> None:
    where = {"cu_seqlens_q": integers(3), "page_table": integers(2, 9), "seqused_k": integers(2), "max_seqlen_k": 1000}
    cache = normal(6, 128, 2, 256).transpose(1, 2)
    k, v = cache.split(128, -1)
    ops.sparse_decode(normal(2, 32, 128), k, v, integers(2, 2, 16), **where)
    assert launched == ["sparse_decode", "combine"]


@pytest.mark.parametrize(("place", "make"), PLACES)
def test_msa_decode(launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor]) -> None:
    """Ids are chosen inside sparse_decode; few rows are split and merged, many are not."""
    where = place(make, 2, 128)
    k = where.pop("keys")
    idx_k = place(make, None, 128)["keys"]
    ops.msa_decode(make(130, 32, 128), k, k, make(130, 4, 128), idx_k, 16, **where)
    ids = torch.zeros(130, 2, 5, dtype=torch.int32).transpose(0, 1)
    ops.msa_decode(make(130, 32, 128), k, k, make(130, 2, 128), idx_k, 5, block_indices=ids, init_blocks=1, **where)
    assert [name for name in launched if name != "combine"] == ["decode_score", "sparse_decode"] * 2


@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_msa_decode_on_fp8(
    launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor], token_scales: bool
) -> None:
    """Of its two kernels each has the precision of its own tensors."""
    where = place(make, 2, 128)
    k, idx_k = as_fp8(where.pop("keys")), place(make, None, 128)["keys"]
    q, idx_q = make(130, 32, 128), make(130, 4, 128)
    scales = {"k_scale": torch.ones(k.shape[:-1]) if token_scales else torch.tensor(0.5), "v_scale": torch.ones(2)}
    ops.msa_decode(q, k, k, idx_q, idx_k, 16, **scales, **where)
    of_index = {f"index_{name}": scale for name, scale in scales_of(idx_k, token_scales).items()}
    ops.msa_decode(q, k, k, as_fp8(idx_q), as_fp8(idx_k), 16, **scales, **of_index, **where)
    assert [name for name in launched if name != "combine"] == ["decode_score", "sparse_decode"] * 2


@TARGETS
@pytest.mark.parametrize(("place", "make"), PLACES)
def test_sparse_attention(launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor]) -> None:
    where = place(make, 2, 128)
    k = where.pop("keys")
    ids = integers(2, 130, 3)
    ops.sparse_attention(make(130, 32, 128), k, k, ids, **where)
    ops.sparse_attention(make(130, 32, 128), k, k, ids, out=strided(130, 32, 128), return_lse=True, **where)
    few = integers(2, 130, 1)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    ops.sparse_attention(make(130, 32, 128), k, k, few, workspace=workspace, **where)
    number = -(-130 // windows.window_for(130, (1 << 20) // workspaces.partial_bytes(1, 32, 128)))
    window = ["sparse_attention", "combine"]
    assert launched == [*["build_schedule", *window] * 2, "build_schedule", *window * number]


@pytest.mark.parametrize("place", [flat, packed, paged])
def test_split_selection(launched: list[str], place: Callable[..., dict]) -> None:
    """A part of sparse_attention, which no GPU serves here: as it calls it."""
    given = place(normal, 2, 128)
    where = Where(**{name: value for name, value in given.items() if name != "keys"})
    wide = torch.zeros(130, 5, 2, dtype=torch.int32).permute(2, 0, 1)
    for tile_tokens, ids in ((4, integers(2, 130, 16)), (8, wide), (8, integers(1, 130, 1))):
        variant = {"block_size": 128, "tile_tokens": tile_tokens}
        facts = lookup.call_facts("split_selection", where, CPU, "bf16", variant, queries=130)
        facts = dataclasses.replace(facts, features=facts.features - {"paged"})
        at = places.place(where, 130, 130, 128, CPU)
        attention.split_selection(facts, "cutedsl", ids, at, fill=3, **variant)
    assert launched == ["split_selection"] * 3


@pytest.mark.parametrize(("place", "make"), PLACES)
def test_hybrid_attention(
    launched: list[str], monkeypatch: pytest.MonkeyPatch, place: Callable[..., dict], make: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(lookup, "part_serves", lambda _facts, _backend, op, *_: op == "shared_attention")
    where = place(make, 2, 128)
    k = where.pop("keys")
    ids = integers(2, 130, 3)
    ops.sparse_attention(make(130, 32, 128), k, k, ids, **where)
    ops.sparse_attention(make(130, 32, 128), k, k, ids, out=strided(130, 32, 128), return_lse=True, **where)
    assert launched == ["split_selection", "build_schedule", "sparse_attention", "shared_attention"] * 2
    launched.clear()
    for quantize in (quantize_nvfp4, quantize_mxfp4):
        ops.sparse_attention(make(130, 32, 128), quantize(k), quantize(k), ids, **where)
    # What reads ids alone has no kernel by the name of this precision.
    assert launched == ["sparse_attention", "shared_attention"] * 2


@pytest.mark.parametrize(("place", "make"), PLACES[:2])
def test_sparse_attention_backward(
    launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor]
) -> None:
    where = place(make, 2, 128)
    k = where.pop("keys")
    q, lse, ids = make(130, 32, 128), torch.zeros(130, 64)[:, ::2], integers(2, 130, 3)
    ops.sparse_attention_backward(q, q, k, k, q, lse, ids, **where)
    ops.sparse_attention_backward(q, q, k, k, q, lse, ids, dlse=lse, **where)
    assert launched == ["build_schedule", "gradient_rows", "sparse_attention_backward", "merge_gradients"] * 2


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("place", "make"), PLACES[:2])
def test_index_kl(launched: list[str], place: Callable[..., dict], make: Callable[..., Tensor], prefix: bool) -> None:
    """With gradients and without, of selected blocks and of the whole prefix."""
    where = place(make, 2, 128)
    k = where.pop("keys")
    q, lse, idx_q = make(130, 32, 128), torch.zeros(130, 64)[:, ::2], make(130, 2, 128)
    idx_k = place(make, None, 128)["keys"]
    ids = None if prefix else integers(2, 130, 3)
    ops.index_kl(q, k, lse, idx_q, idx_k, ids, **where)
    weights = torch.ones(130)
    ops.index_kl(q, k, lse, idx_q.requires_grad_(), idx_k, ids, token_weights=weights, **where)
    assert set(launched) == {"build_schedule", "index_lse", "index_kl", "index_gradients"}
    # One window each time; gradients follow only where they are wanted.
    assert [name for name in launched if name != "build_schedule"] == [
        *["index_lse", "index_kl"] * 2, "index_gradients"
    ]  # fmt: skip


@TARGETS
@pytest.mark.parametrize("make", [normal, strided])
def test_combine(launched: list[str], make: Callable[..., Tensor]) -> None:
    partial_out = torch.stack([make(3, 5, 128)] * 4)
    ops.combine(partial_out, torch.zeros(4, 3, 5))
    ops.combine(partial_out[:1], torch.zeros(4, 5, 3).transpose(1, 2)[:1])
    assert launched == ["combine"] * 2


def test_what_does_not_fit_is_refused(launched: list[str]) -> None:
    """A faulty call must not pass for a good one here."""
    facts = types.SimpleNamespace(precision="bf16", features=frozenset(), variant={"head_dim": 128})
    kernel = runtime.find_kernel("combine", facts)
    partials, lses, out, lse = normal(4, 3, 5, 128), torch.zeros(4, 3, 5), normal(3, 5, 128), torch.zeros(3, 5)
    for arguments in ((partials, lses, out), (partials, lses, out.float(), lse), (partials, lses, out[:2], lse)):
        with pytest.raises((TypeError, ValueError), match="when calling"):
            kernel(*arguments)
    assert launched == []
