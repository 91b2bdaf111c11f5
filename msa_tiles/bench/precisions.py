"""Precisions as benchmarks name them: that of an operator, or `q8k8+q16kv8`, an indexer's and an attention's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from msa_tiles.bench import cases
from msa_tiles.spec.precisions import named

BF16 = "bf16"
INDEXER = (BF16, "q8k8")
ATTENTION = (BF16, "q16kv8")
BOTH = (BF16, "q8k8+q16kv8")
"""What operators are timed in that read index keys, keys and values, or all of them."""


def part(op: str, precision: str) -> str:
    """The precision in which one operator takes part; `bf16` for an operator that reads neither kind of keys."""
    reads = set(cases.specs().operators[op].roles)
    if not reads & {"key_value", "index_key"}:
        return BF16
    fitting = (name for name in precision.split("+") if reads <= {*cases.specs().precisions[name].roles, "output"})
    return next(fitting, precision)


def group(precision: str) -> str:
    """The name under which people look for it; the first of a pair's."""
    return cases.specs().precisions[precision.split("+")[0]].group


def chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of the known precisions that are meant by names of precisions, pairs and groups; all where none is given.

    Raises ValueError for a name that means none of them.
    """
    groups = {precision: group(precision) for precision in known}
    return named(names, groups, set(groups.values())) if names else list(groups)


def multiplied(op: str, precision: str) -> str:
    """The element that an operator multiplies in a precision that it takes part in."""
    return cases.specs().precisions[part(op, precision)].multiply


def roles(precision: str) -> set[str]:
    """The tensors that a precision is about: `query`, `key_value` or `index_key`."""
    return {role for name in precision.split("+") for role in cases.specs().precisions[name].roles}


def dtype(precision: str, role: str) -> torch.dtype:
    """What tensors of a role are stored in, `query`, `key_value` or `index_key`."""
    for name in precision.split("+"):
        stored = cases.specs().precisions[name].roles.get(role)
        if stored is not None:
            return getattr(torch, stored.storage)
    raise ValueError(f"{precision} has no {role}")
