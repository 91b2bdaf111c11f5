"""From a validated call to a kernel: what the dispatcher needs to know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles import readable, runtime, trees
from msa_tiles.call.where import Where
from msa_tiles.call.workspace import ALIGNMENT, address
from msa_tiles.runtime import CallFacts, tuned

# An axis of a grid holds no more CTAs than that, but the first.
MOST_HEADS = 65_535


# The size by which a kernel is chosen that must be the same for every size.
INVARIANT_SIZES = {"sparse_attention": 32_768, "sparse_decode": 64}


def size_of(op: str, queries: int, batch_invariant: bool) -> int:
    """The number of queries by which the kernels of a call are chosen among those that were measured."""
    return INVARIANT_SIZES[op] if batch_invariant else queries


def precision(**tensors: Tensor | str) -> str:
    """The precision of a call whose tensors of these roles are stored like that, or as `formats.stored` says.

    Roles are `query`, `key_value`, `index_key` and `output`. Which of the precisions that are stored alike serves the
    call, one that decodes on the chip or one that multiplies natively, is for dispatch to say.
    """
    return _precision(
        **{role: t if isinstance(t, str) else str(t.dtype).removeprefix("torch.") for role, t in tensors.items()}
    )


@trees.cached(maxsize=64)
def _precision(**storages: str) -> str:
    return runtime.default_registry().precision_of(storages)


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
    heads: int = 1,
    unaligned: bool = False,
    widened: bool = False,
) -> CallFacts:
    """What the dispatcher needs to know. ``wide`` are the tensors that a kernel reads 16 bytes or more at a time.

    ``heads`` are the most that one of the tensors has; ``unaligned`` says that another tensor lies where kernels cannot
    read what they read at a time, ``widened`` that queries came in a narrower format.
    """
    if heads > MOST_HEADS:
        refusals = (*refusals, f"{heads} heads, wanted at most {MOST_HEADS}: they lie along an axis of the grid")
    features = set()
    if where.page_table is not None:
        features.add("paged")
    if where.q_positions is not None:
        features.add("q_positions")
    if where.k_offset is not None:
        features.add("k_offset")
    if unaligned or not all(aligned(tensor) for tensor in wide):
        features.add("strided_unaligned")
    if any(expanded(tensor) for tensor in wide):
        features.add("expanded")
    return CallFacts(op, device, precision, variant, frozenset(features), refusals, tuned.bucket(queries), widened)


@trees.cached(maxsize=256)
def broken_rules(op: str, **dims: int) -> tuple[str, ...]:
    """Sentences for the rules of the operator's spec that these dims break: no kernel promises anything beyond them."""
    came = ", ".join(f"{name} = {value}" for name, value in dims.items())
    rules = readable.specs().operators[op].rules
    return tuple(f"{came}, wanted {rule}" for rule in rules if rule.names <= dims.keys() and not rule(dims))


def find_kernel(facts: CallFacts, backend: str) -> Any:
    """The kernel that serves the call."""
    return runtime.find_kernel(facts.op, facts, backend=backend)


def part_facts(
    facts: CallFacts,
    op: str,
    variant: Mapping[str, int],
    features: frozenset[str],
    precision: str | None = None,
) -> CallFacts:
    """The facts of a kernel that a call launches on its way, with what the call needs of that kernel."""
    precision = precision or facts.precision
    return dataclasses.replace(facts, op=op, variant=variant, features=features, precision=precision)


def part_kernel(
    facts: CallFacts,
    backend: str,
    op: str,
    variant: Mapping[str, int],
    features: frozenset[str],
    precision: str | None = None,
) -> Any:
    """That kernel. For those of other operators than the call's own, ``backend`` is a preference."""
    part = part_facts(facts, op, variant, features, precision)
    return runtime.find_kernel(op, part, backend=backend, helper=op != facts.op)


def part_serves(
    facts: CallFacts,
    backend: str,
    op: str,
    variant: Mapping[str, int],
    features: frozenset[str],
    *,
    verified: bool = False,
) -> bool:
    """Whether there is one, and with ``verified`` one that has run on its GPU."""
    part = part_facts(facts, op, variant, features)
    return runtime.serves(op, part, backend=backend, helper=True, verified=verified)


def serves(facts: CallFacts, backend: str) -> bool:
    """Whether `find_kernel` finds one."""
    return runtime.serves(facts.op, facts, backend=backend)


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


def expanded(tensor: Tensor) -> bool:
    """Whether a tensor repeats elements by a stride of 0, which not every kernel can describe to TMA."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def aligned(tensor: Tensor) -> bool:
    """Whether every row of a tensor begins where TMA boxes and the widest loads may."""
    if address(tensor) % ALIGNMENT:
        return False
    width = tensor.element_size()
    return all(
        size == 1 or (stride * width) % ALIGNMENT == 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
