"""Errors of the drop-ins name the caller's own parameters, whatever comes for a tensor or a number."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from msa_tiles.compat import arguments, flash_msa, flashinfer, fmha_sm100, vllm

B, T, TK, HEADS, KV_HEADS, DIM, PAGE, PAGES, BLOCKS, TOPK = 2, 8, 500, 4, 2, 16, 128, 6, 3, 2


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


CU_Q, CU_K, USED, OFFSET = ints(0, 3, 8), ints(0, 200, 500), ints(200, 300), ints(190, 290)
TABLE, IDS = torch.arange(PAGES, dtype=torch.int32).view(B, BLOCKS), zeros(KV_HEADS, T, TOPK, dtype=torch.int32)
Q, ROWS = zeros(T, HEADS, DIM), zeros(TK, KV_HEADS, DIM)
POOL = zeros(PAGES, KV_HEADS, PAGE, DIM)
BYTES = {name: zeros(*POOL.shape[:-1], DIM // 2, dtype=torch.uint8) for name in "kv"}
SCALES = {f"{name}_scale": zeros(*POOL.shape[:-1], DIM // 16, dtype=torch.uint8) for name in "kv"}
CSR = fmha_sm100.build_k2q_csr(IDS, CU_Q, CU_K, PAGE, total_k=TK)
FIRST_HEADS = zeros(1, HEADS, PAGE, DIM)


def scales_of(rows: int) -> Tensor:
    """NVFP4 scales of a small head dim in tiles of 128 rows by 4 groups."""
    return zeros(-(-rows // 128) * 512, dtype=torch.uint8)


def planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor | None,
    page_table: Tensor,
    seqused_k: Tensor,
    seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor | None,
    lse: Tensor | None,
) -> Any:
    """Both steps of the object that decodes."""
    where = {"page_table": page_table, "seqused_k": seqused_k, "seqlen_q": seqlen_q, "max_seqlen_k": max_seqlen_k}
    wrapper = fmha_sm100.SparseDecodePagedAttentionWrapper().plan(q2k_indices=q2k_indices, **where)
    return wrapper.run(q, k, v, out=out, lse=lse)


class Call(NamedTuple):
    """A call that succeeds and reads every tensor and number that it is given."""

    function: Callable[..., Any]
    given: dict[str, Any]

    def __call__(self, **changes: Any) -> Any:
        given = self.given | changes
        if self.function is flash_msa.flash_msa_func_warmup:
            given["top_k"] = PAGE  # without effect
        found = self.function(**given)
        return found() if callable(found) else found


def planned_for(**options: Any) -> dict[str, Any]:
    plan = fmha_sm100.fmha_sm100_plan(CU_Q.diff(), USED, HEADS, device="cpu", **options)
    return {"q": Q, "plan_info": plan, "q_offset_override": OFFSET, "sm_scale": 0.25, "out": zeros(*Q.shape)}


WARMUP = {"q_proxy": FIRST_HEADS, "k_proxy": FIRST_HEADS[:, :1], "q": FIRST_HEADS}
WARMUP |= {"k": FIRST_HEADS[:, :2], "v": FIRST_HEADS[:, :2], "scale": 0.25}
FLAT = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "q_offset": OFFSET}
PAGED = {"cu_seqlens_q": CU_Q, "page_table": TABLE, "seqused_k": USED}
SCORED = {"max_k_tiles": BLOCKS, "output": zeros(HEADS, BLOCKS, T)}
ATTENDED = {"q": Q, "k": ROWS, "v": ROWS, "q2k_indices": IDS, "out": zeros(*Q.shape), "softmax_scale": 0.25}
GLOBAL = {"k_global_scale": 1.0, "v_global_scale": 1.0}
FOUR_BITS = {**ATTENDED, **BYTES, **SCALES, **GLOBAL}
STEP = {"page_table": TABLE, "seqused_k": USED, "seqlen_q": T // B}
PROXY_BYTES = {"q_scale": scales_of(T * HEADS), "q_global_scale": 1.0, "k_global_scale": 1.0}
PROXY_BYTES |= {"q_fp4": zeros(T, HEADS, DIM // 2, dtype=torch.uint8)}
SELECTED = {"max_score": zeros(KV_HEADS, BLOCKS, T), "topk": TOPK, "num_valid_pages": ints(*[2] * T)}
SELECTED |= {"output": zeros(T, KV_HEADS, TOPK, dtype=torch.int32), "force_begin_blocks": 1, "force_end_blocks": 1}
INVERTED = {"k2q_row_ptr": CSR[0], "k2q_q_indices": CSR[1], "topK": TOPK, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
INVERTED |= {"max_seqlen_q": 5, "max_seqlen_k": 300, "blk_kv": PAGE, "q": Q}
INDEXED = {"idx_q": zeros(T, KV_HEADS, DIM), "index_kv_cache": zeros(PAGES, PAGE, DIM), "block_table": TABLE}
INDEXED |= {"seq_lens": USED, "max_seq_len": 300, "num_kv_heads": KV_HEADS}
PREFILL = {"cu_seqlens_q": CU_Q, "prefix_lens": OFFSET, "max_query_len": 5}
DECODED = {"init_blocks": 1, "local_blocks": 1, "decode_query_len": T // B, "max_decode_query_len": T // B}
DECODED |= {"score_out": zeros(KV_HEADS, T, BLOCKS)}
SERVED = {"q": Q.bfloat16(), "kv_cache": zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8), "topk_idx": IDS}
SERVED |= {"block_table": TABLE, "seq_lens": USED, "num_kv_heads": KV_HEADS, "sm_scale": 0.25}
SERVED |= {"output": Q.bfloat16(), "k_scale": torch.ones(()), "v_scale": torch.ones(())}
LSE = {"lse": zeros(T, HEADS)}
CALLS = {
    "flash_msa": Call(flash_msa.flash_msa_func, {**WARMUP, "top_k": PAGE}),
    "flash_msa warmup": Call(flash_msa.flash_msa_func_warmup, WARMUP),
    "proxy flat": Call(flashinfer.msa_proxy_score, {"q": Q, "k": ROWS} | FLAT | SCORED),
    "proxy paged": Call(flashinfer.msa_proxy_score, {"q": Q, "k": POOL, "max_seqlen_q": 5} | PAGED),
    "proxy4 flat": Call(
        flashinfer.msa_proxy_score_fp4,
        {"k_fp4": zeros(TK, KV_HEADS, DIM // 2, dtype=torch.uint8), "k_scale": scales_of(TK * KV_HEADS)}
        | PROXY_BYTES | FLAT | SCORED,
    ),
    "proxy4 paged": Call(
        flashinfer.msa_proxy_score_fp4,
        {"k_fp4": BYTES["k"], "k_scale": scales_of(PAGES * KV_HEADS * PAGE)} | PROXY_BYTES | PAGED,
    ),
    "attention flat": Call(flashinfer.msa_sparse_attention, {**ATTENDED, **FLAT, "causal": True}),
    "attention 4 bits": Call(flashinfer.msa_sparse_attention, {**FOUR_BITS, **PAGED}),
    "decode flat": Call(
        flashinfer.msa_sparse_decode_attention,
        {**ATTENDED, "cu_seqlens_k": CU_K, "q_offset": OFFSET, "seqlen_q": T // B},
    ),
    "decode 4 bits": Call(flashinfer.msa_sparse_decode_attention, {**FOUR_BITS, **STEP}),
    "decode prepared": Call(flashinfer.prepare_msa_nvfp4_sparse_decode, {**FOUR_BITS, **STEP, **LSE}),
    "select": Call(flashinfer.msa_topk_select, SELECTED),
    "select fmha": Call(
        fmha_sm100.sparse_topk_select,
        {**SELECTED, "max_score_layout": "HKT", "block_table": zeros(T, KV_HEADS, BLOCKS, dtype=torch.int32)},
    ),
    "invert": Call(
        fmha_sm100.build_k2q_csr,
        {"q2k_indices": IDS, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "kv_block_size": PAGE, "total_k": TK},
    ),
    "invert object": Call(
        fmha_sm100.SparseK2qCsrBuilderSm100().__call__,
        {"q2k_indices": IDS, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "blk_kv": PAGE, "total_k": TK},
    ),
    "inverted flat": Call(fmha_sm100.sparse_atten_func, {**INVERTED, "k": ROWS, "v": ROWS, "softmax_scale": 0.25}),
    "inverted paged": Call(
        fmha_sm100.sparse_atten_func, {**INVERTED, "k": POOL, "v": POOL, "page_table": TABLE, "seqused_k": USED}
    ),
    "inverted 4 bits": Call(
        fmha_sm100.sparse_atten_nvfp4_kv_func,
        {**INVERTED, **BYTES, **SCALES, "page_table": TABLE, "seqused_k": USED}
        | {"k_global_scale": torch.ones(1), "v_global_scale": torch.ones(1)},
    ),
    "decode fmha": Call(
        fmha_sm100.sparse_decode_atten_func,
        {**STEP, "q": Q, "k": POOL, "v": POOL, "q2k_indices": IDS, "max_seqlen_k": 300, "softmax_scale": 0.25},
    ),
    "decode planned": Call(
        planned,
        {**STEP, **LSE, "q": Q, "k": POOL, "v": POOL, "q2k_indices": IDS, "max_seqlen_k": 300, "out": zeros(*Q.shape)},
    ),
    "scores 4 bits": Call(
        fmha_sm100.fp4_indexer_block_scores,
        {"q_fp4": PROXY_BYTES["q_fp4"], "q_scale": zeros(T, HEADS, 1, dtype=torch.uint8), "k_fp4": BYTES["k"]}
        | {"k_scale": SCALES["k_scale"], "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "cu_page_offsets": ints(0, 3, 6)}
        | {"kv_indices": TABLE.flatten(), "max_seqlen_q": 5, "max_seqlen_k": 300, "fp4_format": "nvfp4"}
        | {"causal": True, "qo_offset": OFFSET, "scale_layout": "public"},
    ),
    "plan": Call(
        fmha_sm100.fmha_sm100_plan,
        {"qo_segment_lens": CU_Q.diff(), "kv_segment_lens": USED, "qo_offset": OFFSET, "device": "cpu"}
        | {"num_qo_heads": HEADS},
    ),
    "dense flat": Call(
        fmha_sm100.fmha_sm100,
        {**planned_for(output_maxscore=True), "k": ROWS, "v": ROWS, "max_score": zeros(HEADS, PAGE, T)},
    ),
    "dense listed": Call(
        fmha_sm100.fmha_sm100,
        {**planned_for(page_size=PAGE), "k": POOL, "v": POOL, "kv_indices": TABLE.flatten()},
    ),
    "dense chosen": Call(
        fmha_sm100.fmha_sm100,
        {**planned_for(page_size=PAGE, kv_block_num=2), "k": POOL, "v": POOL, "page_table": TABLE}
        | {"kv_block_indexes": IDS.transpose(0, 1)},
    ),
    "vllm score": Call(vllm.minimax_m3_index_score, {**INDEXED, **PREFILL}),
    "vllm topk": Call(
        vllm.minimax_m3_index_topk,
        {**PREFILL, "score": zeros(KV_HEADS, T, 16), "topk": TOPK, "init_blocks": 1, "local_blocks": 1}
        | {"out": IDS.clone()},
    ),
    "vllm decode score": Call(vllm.minimax_m3_index_decode_score, {**INDEXED, **DECODED}),
    "vllm decode": Call(
        vllm.minimax_m3_index_decode, {**INDEXED, **DECODED, "topk": TOPK, "out": IDS.clone()}
    ),
    "vllm attention": Call(vllm.minimax_m3_sparse_attn, {**SERVED, **PREFILL}),
    "vllm attention decode": Call(vllm.minimax_m3_sparse_attn_decode, {**SERVED, "decode_query_len": T // B}),
}  # fmt: skip
# Without effect, or refused whatever it is; a plan only keeps its tensors, which `planned` reads.
UNREAD = {"LSE_partial", "O_partial", "seq_lens of sparse_topk_select"}
# Without one of these there is nothing to do, or nothing is read of it.
MAY_BE_EMPTY = {"q", "k", "q2k_indices", "kv_indices", "idx_q", "index_kv_cache", "kv_cache"}


def kinds(function: Callable[..., Any]) -> dict[str, list[str]]:
    """What parameters may be, by their annotations."""
    return {name: str(each.annotation).split(" | ") for name, each in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_tensor_or_number_is_named(name: str) -> None:
    call = CALLS[name]
    call()
    for parameter, may_be in kinds(call.function).items():
        if parameter not in call.given or "str" in may_be or not {"Tensor", "int", "float"} & set(may_be):
            continue
        wrong: list[Any] = ["x", [1, 2]]
        if "Tensor" in may_be and "None" not in may_be:
            wrong.append(None)
        for each in wrong:
            told = rf"^{parameter}: got (None|{type(each).__name__}); wanted "
            with pytest.raises((ValueError, TypeError), match=told):
                call(**{parameter: each})


def blamed(call: Call, parameter: str, value: Tensor) -> str | None:
    """The parameter that an error of this call begins with."""
    try:
        call(**{parameter: value})
    except (ValueError, TypeError) as error:
        return str(error).split(":")[0]
    return None


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_of_another_shape_is_named(name: str) -> None:
    call = CALLS[name]
    may_be = kinds(call.function)
    for parameter, given in call.given.items():
        if not isinstance(given, Tensor) or "Tensor" not in may_be[parameter] or given.numel() == 1:
            continue  # a number may have any shape
        if "offset" not in parameter or "offsets" in parameter:  # one offset for all requests
            assert blamed(call, parameter, given.new_zeros(())) == parameter
        if not (parameter.endswith("_scale") and given.dim() == 1):  # tiles are counted, whatever their shape
            assert blamed(call, parameter, given[None]) == parameter
        # Of two that do not go together either may be named.
        found = blamed(call, parameter, given[:0])
        assert found in may_be or (found is None and parameter in MAY_BE_EMPTY), parameter


def test_numbers_of_other_shapes_are_named() -> None:
    for name in ("k_global_scale", "v_global_scale"):
        for shape in ((0,), (2,)):
            assert blamed(CALLS["inverted 4 bits"], name, torch.ones(shape)) == name
        assert blamed(CALLS["inverted 4 bits"], name, torch.ones(1, dtype=torch.float64)) == name
    for name, parameter in (("proxy flat", "q_offset"), ("dense flat", "q_offset_override"), ("plan", "qo_offset")):
        assert blamed(CALLS[name], parameter, OFFSET[:1]) == parameter


@pytest.mark.parametrize("module", [flash_msa, flashinfer, fmha_sm100, vllm])
def test_every_tensor_of_every_drop_in_is_tried(module: Any) -> None:
    for name in module.__all__:
        function = getattr(module, name)
        if not inspect.isfunction(function) or name == "supports_packed_kv":
            continue
        tried = {key for call in CALLS.values() if call.function is function for key in call.given}
        tensors = {parameter for parameter, may_be in kinds(function).items() if "Tensor" in may_be}
        assert {each for each in tensors - tried if not {each, f"{each} of {name}"} & UNREAD} == set(), name


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flash_msa", {"scale": 0.0}, "scale: got 0.0; wanted a number above 0"),
        ("flash_msa", {"scale": None}, "scale: got NoneType; wanted a number"),
        ("flash_msa", {"q_proxy": FIRST_HEADS.half()}, "q_proxy: got dtype torch.float16"),
        ("flash_msa", {"k_proxy": FIRST_HEADS[:, :1].double()}, "k_proxy: got dtype torch.float64; .* like q_proxy"),
        ("proxy flat", {"k": ROWS[:, 0]}, r"k: got shape \[500, 16\]; wanted \[Tk, Hkv, D\]"),
        ("proxy flat", {"k": ROWS[..., :8]}, "k: got index dim 8; wanted 16 like q$"),
        ("proxy flat", {"q_offset": OFFSET.long()}, "q_offset: got dtype torch.int64"),
        ("proxy4 flat", {"q_offset": OFFSET.long()}, "q_offset: got dtype torch.int64"),
        ("attention flat", {"q2k_indices": IDS.long()}, "q2k_indices: got dtype torch.int64"),
        ("attention flat", {"q_offset": OFFSET.long()}, "q_offset: got dtype torch.int64"),
        (
            "attention flat",
            {"return_temperature_lse": True, "lse_temperature_scale": -1.0},
            "lse_temperature_scale: got -1.0",
        ),
        ("decode flat", {"q2k_indices": IDS[0]}, "q2k_indices: got shape"),
        ("decode 4 bits", {"q2k_indices": IDS.long()}, "q2k_indices: got dtype torch.int64"),
        ("decode prepared", {"lse": zeros(1)}, "lse: got torch.float32"),
        ("select", {"max_score": SELECTED["max_score"].half()}, "max_score: got dtype torch.float16"),
        ("select", {"topk": None}, "topk: got NoneType; wanted an integer"),
        ("select fmha", {"topk": -1, "output": None}, "topk: got -1; wanted at least 1"),
        ("select", {"num_valid_pages": ints(1, 2)}, "num_valid_pages: got shape"),
        ("select", {"num_valid_pages": -1}, "num_valid_pages: got -1"),
        ("select", {"force_end_blocks": -1}, "force_end_blocks: got -1"),
        ("select fmha", {"force_begin_blocks": -1}, "force_begin_blocks: got -1"),
        ("select", {"output": SELECTED["output"].expand(3, T, KV_HEADS, TOPK)[0].mT.mT[:1]}, "output: got torch.int32"),
        ("invert object", {"blk_kv": 0}, "blk_kv: got 0"),
        ("decode fmha", {"q2k_indices": IDS.long()}, "q2k_indices: got dtype torch.int64"),
        ("decode fmha", {"blk_kv": 0}, "blk_kv: got 0"),
        ("scores 4 bits", {"kv_indices": TABLE.flatten().long()}, "kv_indices: got dtype torch.int64"),
        ("scores 4 bits", {"qo_offset": OFFSET.long()}, "qo_offset: got dtype torch.int64"),
        ("attention flat", {"cu_seqlens_q": CU_Q[0]}, r"cu_seqlens_q: got shape \[\]; wanted 1 dimensions \[B \+ 1\]"),
        ("attention 4 bits", {"seqused_k": USED[:1]}, r"seqused_k: got shape \[1\]; wanted \[B\] = \[2\]"),
        ("proxy flat", {"q_offset": OFFSET[None]}, r"q_offset: got shape \[1, 2\]; wanted 1 dimensions \[B\]"),
        ("dense flat", {"k": ROWS[:1]}, "plan_info: got 0 to 500"),
        ("plan", {"device": "x"}, "device: got 'x'; wanted a device of torch"),
        ("dense flat", {"sm_scale": 0.0}, "sm_scale: got 0.0"),
        ("dense chosen", {"kv_block_indexes": IDS.transpose(0, 1)[:1]}, "kv_block_indexes: got shape"),
        ("vllm score", {"index_kv_cache": INDEXED["index_kv_cache"].double()}, "index_kv_cache: got dtype"),
        ("vllm score", {"max_query_len": -1}, "max_query_len: got -1"),
        ("vllm topk", {"out": IDS.long()}, "out: got dtype torch.int64"),
        ("vllm decode", {"out": IDS.long()}, "out: got dtype torch.int64"),
        ("vllm decode", {"score_out": DECODED["score_out"].half()}, "score_out: got dtype torch.float16"),
        ("vllm decode score", {"score_out": DECODED["score_out"].half()}, "score_out: got dtype torch.float16"),
        ("vllm attention", {"topk_idx": IDS.long()}, "topk_idx: got dtype torch.int64"),
        ("vllm attention", {"sm_scale": 0.0}, "sm_scale: got 0.0"),
        ("vllm attention", {"output": Q}, "output: got dtype torch.float32"),
        ("vllm attention decode", {"kv_cache": SERVED["kv_cache"].double()}, "kv_cache: got dtype torch.float64"),
    ],
)
def test_operators_parameters_have_the_callers_names(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        CALLS[name](**changes)


def test_what_is_not_about_arguments_stays_as_it_is() -> None:
    @arguments.told(idx_q="q")
    def called(q: Tensor, count: int, error: Exception) -> None:
        """Raise that."""
        raise error

    for error in (RuntimeError("idx_q: out of memory"), NotImplementedError("idx_q"), ValueError(), KeyError(3)):
        before = error.args
        with pytest.raises(type(error)) as caught:
            called(Q, torch.tensor(3), error)
        assert caught.value is error and error.args == before
    with pytest.raises(ValueError, match=r"^the idx_q of a layer, like q, of idx_qs"):
        called(Q, 1, error=ValueError("the idx_q of a layer, like idx_q, of idx_qs"))
    with pytest.raises(TypeError, match=r"^count: got Tensor; wanted an integer") as caught:
        called(Q, Q, error)
    assert caught.value.__cause__ is error
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'error'"):
        called(Q, 1)
