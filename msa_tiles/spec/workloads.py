"""Reads the call shapes on which an operator is verified and benchmarked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msa_tiles.spec.mistakes import Mistakes
from msa_tiles.spec.model import POSITION_DIMS, Parameter, Variants, Workload, frozen
from msa_tiles.spec.source import Fields, Node

SELECTIONS = ("uniform", "sticky")
VALUES = ("normal", "integer")
POINTS = ("m3", "ci")
LONGEST = 1 << 27  # tokens of a request
_OWN_KEYS = ("label", "sequences", "values", "selection", "points")


def read_workloads(
    node: Node,
    dims: dict[str, Any],
    parameters: Mapping[str, Parameter | None],
    reads_ids: bool,
    variants: Variants,
) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """(verify, bench). `defaults` holds what every workload shares; a workload's own keys win.

    `parameters` are None where they have a mistake; what workloads say of those is not read. `reads_ids` says whether
    block ids are among the inputs.
    """
    free = [name for name, value in dims.items() if value is None and name not in POSITION_DIMS]
    settable = [*free, *variants.capacity, *(name for name, p in parameters.items() if p is None or p.type != "dim")]

    def value_of(name: str, value: Node) -> Any:
        if name in dims:
            return value.integer(minimum=1)
        parameter = parameters[name]
        return None if parameter is None else parameter_value(value, parameter.type, parameter.choices)

    def read(item: Node) -> Workload:
        with Mistakes() as mistakes:
            own = Fields(mistakes, item, ("label", "sequences"), optional=(*_OWN_KEYS[2:], *settable))
            given = defaults | {name: value for name, value in own.nodes.items() if name in settable}
            for name in free:
                if name not in given:
                    mistakes.add(
                        item.error(f"{item.name} gives no value for the dim {name!r}, and neither do the defaults")
                    )
            if reads_ids != ("selection" in own):
                wanted = f"needs `selection`, one of {', '.join(SELECTIONS)}" if reads_ids else "takes no `selection`"
                mistakes.add(item.error(f"{item.name} {wanted}: it is about the block ids that the operator reads"))
            label = own.get("label", _label)
            sequences = own.get("sequences", _sequences)
            values = mistakes.entries(value_of, given)
            drawn = own.get("values", lambda node: node.string(VALUES), "normal")
            selection = own.get("selection", lambda node: node.string(SELECTIONS))
            points = own.get("points", lambda node: node.string(POINTS), "m3")
        return Workload(
            label=label,
            sequences=sequences,
            dims=frozen({name: value for name, value in values.items() if name in dims}),
            parameters=frozen({name: value for name, value in values.items() if name not in dims}),
            values=drawn,
            selection=selection,
            points=points,
            where=item.where,
        )

    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("verify", "bench"), optional=("defaults",))
        defaults = Fields(mistakes, keys.nodes["defaults"], (), settable).nodes if "defaults" in keys else {}
        verify = keys.get("verify", lambda value: _unique_labels(value, read))
        bench = keys.get("bench", lambda value: _unique_labels(value, read))
        if verify and len(variants.ci) > 1 and all(workload.points != "ci" for workload in verify):
            mistakes.add(
                keys.nodes["verify"].error(
                    "no verify workload has `points: ci`, so most declared values would never run"
                )
            )
    every = (*keys.nodes["verify"].items(), *keys.nodes["bench"].items())
    with Mistakes() as mistakes:
        for name, value in defaults.items():
            if all(name in item.entries() for item in every):
                mistakes.add(value.error(f"default {name!r} is overridden by every workload"))
    return verify, bench


def _label(node: Node) -> str:
    """A name that options and rows of results hold."""
    label = node.string()
    if not re.fullmatch(r"[A-Za-z0-9_]+", label):
        raise node.error(f"{node.name} is {label!r}; a label has letters, digits and _ alone")
    return label


def _unique_labels(node: Node, read: Callable[[Node], Workload]) -> tuple[Workload, ...]:
    workloads: dict[str, Workload] = {}
    with Mistakes() as mistakes:
        items = node.items()
        for item in items:
            workload = mistakes.read(read, item)
            if workload is not None and workload.label in workloads:
                mistakes.add(item.error(f"{node.name} has the label {workload.label!r} twice"))
            elif workload is not None:
                workloads[workload.label] = workload
        if not items:
            mistakes.add(node.error(f"{node.name} must list at least one workload"))
    return tuple(workloads.values())


def _sequences(node: Node) -> tuple[tuple[int, int], ...]:
    with Mistakes() as mistakes:
        return tuple(mistakes.each(_lengths, node.items()))


def _lengths(node: Node) -> tuple[int, int]:
    with Mistakes() as mistakes:
        pair = mistakes.each(lambda item: item.integer(minimum=0), node.items())
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
