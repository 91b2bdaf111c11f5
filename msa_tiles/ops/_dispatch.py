"""From a validated call to a kernel: the facts for the dispatcher and the arguments that every kernel shares."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.ops import _validate
from msa_tiles.ops._where import Where

if TYPE_CHECKING:
    from msa_tiles.runtime import CallFacts

PRECISIONS = {
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float32: "float32",
    torch.float64: "float64",
}

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
    *,
    queries: int,
) -> CallFacts:
    """What the dispatcher needs to know. ``wide`` are the tensors that a kernel reads 16 bytes or more at a time."""
    from msa_tiles.runtime import CallFacts, tuned

    features = set()
    if where.page_table is not None:
        features.add("paged")
    if where.q_positions is not None:
        features.add("q_positions")
    if where.k_offset is not None:
        features.add("k_offset")
    if not all(aligned(tensor) for tensor in wide):
        features.add("strided_unaligned")
    return CallFacts(op, device, precision, variant, frozenset(features), refusals, tuned.bucket(queries))


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

    Its functions get arguments that are validated and not empty (T, Tk, B and topk are positive). ``where`` is a
    `Place`. The functions must not synchronise and find their kernels from ``facts``, the call's `CallFacts`. ``out``
    is [T, Hq, D] with a unit last stride, else any strides; ``lse`` is [T, Hq].

    - ``choose_window(block_indices) -> int``: queries per window of a schedule that `ops.build_schedule` makes.
    - ``allocate_schedule(block_indices, *, num_requests, max_seqlen_k, block_size, window) -> (edges, tasks, counts)``:
      uninitialised tensors; it is the fake kernel too, so shapes follow from its arguments (some may be symbolic).
    - ``build_schedule(facts, block_indices, where, *, block_size, window, edges, tasks, counts, backend="auto")``:
      fills the three.
    - ``prepare(facts, backend, q, block_indices, *, num_requests, block_size, softmax_scale, longest_k,
      schedule_window, workspace_bytes, out) -> launch``: finds the kernels of an attention call. ``longest_k`` bounds
      the keys of a request, ``workspace_bytes`` what partial results take, and ``schedule_window`` is the window of the
      schedule that the call brings, or None. ``prepare`` may look at what `_remember.signature` holds and no further:
      ``launch(q, k, v, block_indices, where, schedule, workspace, out, lse)`` fills ``out`` and ``lse`` of every call
      of that signature. Here ``where`` is a `Where`, ``schedule`` None or ``(edges, tasks, counts)``, and ``workspace``
      None or the caller's uint8 tensor.
    - ``combine(facts, backend, partial_out, partial_lse, *, out, lse)``: fills both.
    """
    return importlib.import_module("msa_tiles.ops._attention_kernels")


def part_facts(facts: CallFacts, op: str, variant: Mapping[str, int], features: frozenset[str]) -> CallFacts:
    """The facts of a kernel that a call launches on its way, with what the call needs of that kernel."""
    return dataclasses.replace(facts, op=op, variant=variant, features=features)


def part_kernel(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int], features: frozenset[str]) -> Any:
    """That kernel. For those of other operators than the call's own, ``backend`` is a preference."""
    from msa_tiles.runtime import find_kernel

    return find_kernel(op, part_facts(facts, op, variant, features), backend=backend, helper=op != facts.op)


def training_kernels() -> Any:
    """The module that launches index_kl and the attention backward on CUDA, imported on first use.

    Its functions get arguments that are validated and not empty (T, Tk and B are positive, and so is topk where there
    are ids), after a kernel was found for ``facts``. ``where`` is a `Place` of flat keys. Gradients that come in have a
    unit last stride, else any strides; those that go out are contiguous and hold anything before. The functions must
    not synchronise, and must bound what they allocate by ``workspace_bytes`` for whatever grows with T * topk, by
    working through windows of queries; FP32 accumulators of the size of a gradient come on top.

    ``schedule`` is None or ``(edges, tasks, counts, window)`` as `attention_kernels` has made it for the forward call.
    With ``deterministic`` three runs are bitwise equal; without, the order of FP32 additions is free.

    - ``sparse_attention_backward(facts, backend, dout, q, k, v, out, lse, block_indices, dlse, where, *, block_size,
      softmax_scale, longest_k, schedule, workspace_bytes, deterministic, dq, dk, dv)``: fills the last three, all of
      their rows. ``dlse`` may be None. A row whose lse is -inf gets 0 and gives nothing, though its ``dout`` and
      ``dlse`` may hold NaN.
    - ``index_kl(facts, backend, q, k, lse, idx_q, idx_k, block_indices, where, *, block_size, softmax_scale,
      index_scale, token_weights, longest_k, schedule, workspace_bytes, deterministic, loss, d_idx_q, d_idx_k)``: fills
      the last three; ``loss`` is a scalar. ``block_indices`` None: the whole prefix. ``token_weights`` is None or
      float32 [T]. ``d_idx_q`` and ``d_idx_k`` are None in a call that wants the loss alone. The gradients are those of
      a loss gradient of 1: the pass over the main scores that gives the loss gives them too, once the index LSE of
      every query is known.
    """
    return importlib.import_module("msa_tiles.ops._training_kernels")


class Place(NamedTuple):
    """Where queries and keys stand, as kernels take it; an absent tensor is replaced by one that is not read."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor
    use_seqused: int
    page_table: Tensor
    q_positions: Tensor
    use_positions: int


def place(where: Where, total_q: int, total_k: int | None, block_size: int, device: torch.device) -> Place:
    """The kernels' arguments, with the defaults made on the device.

    ``total_k`` is None for operators without keys: a request then has as many keys as queries, or ``seqused_k``. Paged
    requests get virtual rows, max_pages * block_size for each. Never synchronises. Needs total_q > 0.
    """
    starts_q = where.cu_seqlens_q
    if starts_q is None:
        starts_q = one_sequence(total_q, device)
    starts_k = where.cu_seqlens_k
    if where.page_table is not None:
        span = max(where.page_table.shape[1], 1) * block_size
        starts_k = torch.arange(0, (where.num_requests + 1) * span, span, dtype=torch.int32, device=device)
    elif starts_k is None:
        if total_k is not None:
            same = where.cu_seqlens_q is None and total_k == total_q
            starts_k = starts_q if same else one_sequence(total_k, device)
        elif where.seqused_k is not None:
            starts_k = torch.nn.functional.pad(where.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            starts_k = starts_q
    return starting_at(where, starts_q, starts_k)


def starting_at(where: Where, starts_q: Tensor, starts_k: Tensor) -> Place:
    """The kernels' arguments of requests that start there; what the call lacks is replaced by what is not read."""
    return Place(
        starts_q,
        starts_k,
        starts_k if where.seqused_k is None else where.seqused_k,
        int(where.seqused_k is not None),
        starts_q[None] if where.page_table is None else where.page_table,
        starts_q if where.q_positions is None else where.q_positions,
        int(where.q_positions is not None),
    )


def partial_bytes(parts: int, num_q_heads: int, head_dim: int) -> int:
    """What ``parts`` partial results of every head take: BF16 outputs and float32 LSE."""
    return parts * num_q_heads * (2 * head_dim + 4)


def partials(workspace: Tensor | None, q: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Partial outputs [rows, columns, Hq, D] and LSE [rows, columns, Hq], in the workspace when there is one."""
    _, num_q_heads, head_dim = q.shape
    size = partial_bytes(rows * columns, num_q_heads, head_dim)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    lse_begin = rows * columns * num_q_heads * head_dim * 2
    outputs, lses, _ = workspace.split_with_sizes((lse_begin, size - lse_begin, workspace.numel() - size))
    outputs = outputs.view(q.dtype).view(rows, columns, num_q_heads, head_dim)
    return outputs, lses.view(torch.float32).view(rows, columns, num_q_heads)


def pages_per_block(where: Where, keys: Tensor, block_size: int) -> int:
    """The kernels' variant of paged keys [pages, …, page, dim]; 0 for flat ones."""
    return 0 if where.page_table is None else block_size // keys.shape[-2]


def oversized_table(where: Where, block_size: int) -> tuple[str, ...]:
    """Why virtual rows of paged keys do not fit, if they do not: kernels count them in int32."""
    if where.page_table is None:
        return ()
    rows = (where.num_requests + 1) * where.page_table.shape[1] * block_size
    if rows < 1 << 31:
        return ()
    return (f"page_table spans {rows} virtual rows (requests x max_pages x block_size), wanted fewer than 2**31",)


def one_sequence(length: int, device: torch.device) -> Tensor:
    """[0, length] in one launch and without a copy from the host."""
    return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)


def check_alignment(name: str, tensor: Tensor) -> None:
    """Refuse a scratch tensor that begins at an odd place; addresses are unknown while a graph is traced."""
    behind = tensor.data_ptr() % ALIGNMENT
    if behind:
        came = f"an address {behind} bytes behind a multiple of {ALIGNMENT}"
        _validate.refuse(name, came, f"a multiple of {ALIGNMENT}")


def aligned(tensor: Tensor) -> bool:
    """Whether every row of a tensor begins where TMA boxes and the widest loads may."""
    if tensor.data_ptr() % ALIGNMENT:
        return False
    width = tensor.element_size()
    return all(
        size == 1 or (stride * width) % ALIGNMENT == 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
