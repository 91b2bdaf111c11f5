"""Reads the call shapes on which an operator is verified and benchmarked."""

from __future__ import annotations

import re
from typing import Any

from msa_tiles.spec.model import POSITION_DIMS, Parameter, Tensor, Variants, Workload, frozen
from msa_tiles.spec.source import Node

SELECTIONS = ("uniform", "sticky")
VALUES = ("normal", "integer")
POINTS = ("m3", "ci")
LONGEST = 1 << 27  # tokens of a request
_OWN_KEYS = ("label", "sequences", "values", "selection", "points")


def read_workloads(
    node: Node,
    dims: dict[str, Any],
    parameters: dict[str, Parameter],
    inputs: dict[str, Tensor],
    variants: Variants,
) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """(verify, bench). `defaults` holds what every workload shares; a workload's own keys win."""
    keys = node.fields(("verify", "bench"), optional=("defaults",))
    free = [name for name, value in dims.items() if value is None and name not in POSITION_DIMS]
    settable = [*free, *variants.capacity, *(name for name, p in parameters.items() if p.type != "dim")]
    defaults = keys["defaults"].fields((), optional=settable) if "defaults" in keys else {}
    reads_ids = "block_indices" in inputs

    def read(item: Node) -> Workload:
        own = item.fields(("label", "sequences"), optional=(*_OWN_KEYS[2:], *settable))
        given = defaults | {name: value for name, value in own.items() if name in settable}
        for name in free:
            if name not in given:
                raise item.error(f"{item.name} gives no value for the dim {name!r}, and neither do the defaults")
        if reads_ids != ("selection" in own):
            wanted = f"needs `selection`, one of {', '.join(SELECTIONS)}" if reads_ids else "takes no `selection`"
            raise item.error(f"{item.name} {wanted}: it is about the block ids that the operator reads")
        return Workload(
            label=_label(own["label"]),
            sequences=tuple(_lengths(pair) for pair in own["sequences"].items()),
            dims=frozen({name: given[name].integer(minimum=1) for name in given if name in dims}),
            parameters=frozen(
                {
                    name: parameter_value(given[name], parameters[name].type, parameters[name].choices)
                    for name in given
                    if name not in dims
                }
            ),
            values=own["values"].string(VALUES) if "values" in own else "normal",
            selection=own["selection"].string(SELECTIONS) if "selection" in own else None,
            points=own["points"].string(POINTS) if "points" in own else "m3",
            where=item.where,
        )

    verify = _unique_labels(keys["verify"], read)
    bench = _unique_labels(keys["bench"], read)
    if len(variants.ci) > 1 and all(workload.points != "ci" for workload in verify):
        raise keys["verify"].error("no verify workload has `points: ci`, so most declared values would never run")
    for name, value in defaults.items():
        if all(name in item.entries() for item in (*keys["verify"].items(), *keys["bench"].items())):
            raise value.error(f"default {name!r} is overridden by every workload")
    return verify, bench


def _label(node: Node) -> str:
    """A name that options and rows of results hold."""
    label = node.string()
    if not re.fullmatch(r"[A-Za-z0-9_]+", label):
        raise node.error(f"{node.name} is {label!r}; a label has letters, digits and _ alone")
    return label


def _unique_labels(node: Node, read: Any) -> tuple[Workload, ...]:
    workloads: list[Workload] = []
    for item in node.items():
        workload = read(item)
        if any(workload.label == other.label for other in workloads):
            raise item.error(f"{node.name} has the label {workload.label!r} twice")
        workloads.append(workload)
    if not workloads:
        raise node.error(f"{node.name} must list at least one workload")
    return tuple(workloads)


def _lengths(node: Node) -> tuple[int, int]:
    pair = [item.integer(minimum=0) for item in node.items()]
    if len(pair) != 2 or max(pair) > LONGEST:
        raise node.error(f"{node.name} must be [queries, keys], of at most {LONGEST} each")
    return pair[0], pair[1]


def parameter_value(node: Node, kind: str, choices: tuple[str, ...]) -> Any:
    """The value written in `node`, for a parameter of this type."""
    if kind == "bool":
        return node.boolean()
    if kind in ("int", "dim"):
        return node.integer(minimum=0)
    return node.number() if kind == "float" else node.string(choices)
