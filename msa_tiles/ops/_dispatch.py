"""From a validated call to a kernel: the facts for the dispatcher and the arguments that every kernel shares."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msa_tiles.ops._where import Where

if TYPE_CHECKING:
    from msa_tiles.runtime import CallFacts

PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "float32", torch.float64: "float64"}

# What the partial results of one window of attention queries may take when the caller does not say.
WORKSPACE_BYTES = 1 << 30

# TMA boxes and the widest loads start at multiples of this many bytes.
ALIGNMENT = 16


def runs_reference(backend: str, device: torch.device) -> bool:
    """CPU tensors run on the reference; CUDA tensors only when it is asked for."""
    return backend == "reference" or device.type != "cuda"


def call_facts(
    op: str,
    where: Where,
    device: torch.device,
    precision: str,
    variant: dict[str, int],
    wide: tuple[Tensor, ...] = (),
    refusals: tuple[str, ...] = (),
) -> CallFacts:
    """What the dispatcher needs to know. ``wide`` are the tensors that a kernel reads 16 bytes or more at a time."""
    from msa_tiles.runtime import CallFacts

    features = set()
    if where.page_table is not None:
        features.add("paged")
    if where.q_positions is not None:
        features.add("q_positions")
    if where.k_offset is not None:
        features.add("k_offset")
    if not all(_aligned(tensor) for tensor in wide):
        features.add("strided_unaligned")
    return CallFacts(op, device, precision, variant, frozenset(features), refusals)


@functools.lru_cache(maxsize=256)
def broken_rules(op: str, **dims: int) -> tuple[str, ...]:
    """Sentences for the rules of the operator's spec that these dims break: no kernel promises anything beyond them."""
    from msa_tiles.paths import specs_dir
    from msa_tiles.spec import load

    came = ", ".join(f"{name} = {value}" for name, value in dims.items())
    rules = load(specs_dir()).operators[op].rules
    return tuple(f"{came}, wanted {rule}" for rule in rules if rule.names <= dims.keys() and not rule(dims))


def find_kernel(facts: CallFacts, backend: str) -> Any:
    """The kernel that serves the call; imports the runtime on first use only."""
    from msa_tiles.runtime import find_kernel as find

    return find(facts.op, facts, backend=backend)


def attention_kernels() -> Any:
    """The module that launches build_schedule, sparse_attention and combine on CUDA, imported on first use.

    Its functions get arguments that are validated and not empty (T, Tk, B and topk are positive). ``cu_seqlens_q``,
    ``cu_seqlens_k`` and ``seqused_k`` are int32 tensors on the device, with ``use_seqused`` 0 or 1 as in `lengths`.
    The functions must not synchronise and find their kernels from ``facts``, the call's `CallFacts` (``replace`` op and
    variant for other operators). ``out`` is [T, Hq, D] with a unit last stride, else any strides; ``lse`` is [T, Hq].

    - ``choose_window(block_indices) -> int``: queries per window of a schedule that `ops.build_schedule` makes.
    - ``allocate_schedule(block_indices, *, num_requests, max_seqlen_k, block_size, window) -> (edges, tasks, counts)``:
      uninitialised tensors; it is the fake kernel too, so shapes follow from its arguments (some may be symbolic).
    - ``build_schedule(facts, block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, *, block_size, window,
      edges, tasks, counts)``: fills the three.
    - ``sparse_attention(facts, backend, q, k, v, block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, *,
      block_size, softmax_scale, max_seqlen_k, schedule, workspace, workspace_bytes, out, lse)``: fills ``out`` and
      ``lse``. ``max_seqlen_k`` may be None; ``schedule`` is None or ``(edges, tasks, counts, window)``; ``workspace``
      is None or the caller's uint8 tensor and ``workspace_bytes`` bounds what partial results take.
    - ``combine(facts, backend, partial_out, partial_lse, *, out, lse)``: fills both.
    """
    return importlib.import_module("msa_tiles.ops._attention_kernels")


def lengths(
    where: Where, total_q: int, total_k: int | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int]:
    """``cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused`` for a kernel, with the defaults made on the device.

    ``total_k`` is None for operators without keys: a request then has as many keys as queries, or ``seqused_k``.
    Never synchronises. Needs total_q > 0.
    """
    starts_q = where.cu_seqlens_q
    if starts_q is None:
        starts_q = _one_sequence(total_q, device)
    starts_k = where.cu_seqlens_k
    if starts_k is None:
        if total_k is not None:
            starts_k = _one_sequence(total_k, device)
        elif where.seqused_k is not None:
            starts_k = torch.nn.functional.pad(where.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            starts_k = starts_q
    if where.seqused_k is None:
        return starts_q, starts_k, starts_k, 0
    return starts_q, starts_k, where.seqused_k, 1


def _one_sequence(length: int, device: torch.device) -> Tensor:
    """[0, length] in one launch and without a copy from the host."""
    return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)


def _aligned(tensor: Tensor) -> bool:
    if tensor.data_ptr() % ALIGNMENT:
        return False
    width = tensor.element_size()
    return all(
        size == 1 or (stride * width) % ALIGNMENT == 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
