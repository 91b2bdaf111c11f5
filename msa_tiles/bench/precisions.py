"""Precisions as benchmarks name them: that of an operator, or `q8k8+q16kv8`, an indexer's and an attention's.

`index_query`, `index_key` and `key_value` are the roles of tensors that such a name tells the formats of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from msa_tiles.bench import cases
from msa_tiles.spec.model import Format
from msa_tiles.spec.precisions import named

BF16 = "bf16"
INDEXER = (BF16, "q8k8", "q16k4", "q8k4", "q16kmx4", "q8kmx4")
ATTENTION = (BF16, "q16kv8", "q16kv4", "q16kvmx4")
BOTH = (BF16, "q8k8+q16kv8", "q16k4+q16kv8", "q16k4+q16kv4", "q16kmx4+q16kv8", "q16kmx4+q16kvmx4")
"""What operators are timed in that read index keys, keys and values, or all of them."""
OTHER_PAIRS = tuple(
    pair
    for indexer in INDEXER
    for attention in ATTENTION
    if indexer != attention and (pair := f"{indexer}+{attention}") not in BOTH
)
"""Every other index format beside every other format of keys and values: timed where they are named."""
SERVED = BOTH[:2]
"""What caches of vLLM's operators hold."""


def halves(precision: str) -> tuple[str, str]:
    """The indexer's and the attention's precision; the same one where a name is no pair."""
    indexer, _, attention = precision.partition("+")
    return indexer, attention or indexer


def part(op: str, precision: str) -> str:
    """The precision in which one operator takes part; `bf16` for an operator that reads neither kind of keys."""
    reads = set(cases.specs().operators[op].roles)
    if not reads & {"key_value", "index_key"}:
        return BF16
    indexer, attention = halves(precision)
    return attention if "key_value" in reads else indexer


def group(precision: str) -> str:
    """The name under which people look for it; the first of a pair's."""
    return cases.specs().precisions[halves(precision)[0]].group


def chosen(names: Sequence[str], known: Sequence[str], on_request: Sequence[str] = ()) -> list[str]:
    """Those of the known precisions that are meant by names of precisions, pairs and groups; all where none is given.

    Those `on_request` are meant by their own names alone. Raises ValueError for a name that means none of them.
    """
    groups = {precision: group(precision) for precision in known}
    if not names:
        return list(groups)
    return named(names, dict.fromkeys(on_request, "") | groups, set(groups.values()))


def multiplied(op: str, precision: str) -> str:
    """The element that an operator multiplies in a precision that it takes part in."""
    return cases.specs().precisions[part(op, precision)].multiply


def stored(precision: str, role: str) -> Format:
    """The format of tensors of a role; BF16 where the precision is of an operator that does not read them."""
    indexer, attention = (cases.specs().precisions[name] for name in halves(precision))
    found = {"index_query": indexer.query, "index_key": indexer.index_key, "key_value": attention.key_value}[role]
    return cases.specs().formats[BF16] if found is None else found


def dtype(precision: str, role: str) -> torch.dtype:
    """What holds the elements of tensors of a role."""
    return getattr(torch, stored(precision, role).storage)
