"""Reads the rows under `kernels:` of an operator: which cells there are, and how each of them is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msa_tiles.spec.expression import read_expression
from msa_tiles.spec.hardware import read_opcodes
from msa_tiles.spec.mistakes import Mistakes
from msa_tiles.spec.model import DSLS, ROLES, WIDE_ELEMENTS, KernelRow, Variants, frozen
from msa_tiles.spec.source import Fields, Node

# Which points of `variants.ci` a row is compiled at; the first is the default.
CI_POINTS = ("pairs", "values")
_ROW_KEYS = ("mma", "tile")
_OPTIONAL_ROW_KEYS = (
    *("compute", "operands", "threads", "shared_memory", "copy", "registers", "tensor_memory", "expect", "features"),
    *("ci", "only"),
)


def read_rows(
    node: Node, variants: Variants | None, features: Collection[str], op: str, seen: list[KernelRow] | None = None
) -> list[KernelRow]:
    """The cells of one row: one for each of its targets and precisions, with what `adjust` says of either.

    A row without targets is one of the target "": of every target that can run it. `variants` are None where they have
    a mistake. `seen` gets the cells also of a row with mistakes, without what is mistaken.
    """
    with Mistakes() as mistakes:
        keys = Fields(
            mistakes,
            node,
            ("dsl", "precisions", *_ROW_KEYS),
            optional=("targets", "algorithm", "adjust", *_OPTIONAL_ROW_KEYS),
        )
        dsl = keys.get("dsl", lambda value: value.string(DSLS))
        algorithm = keys.get("algorithm", Node.identifier, "")
        if "algorithm" in keys and not algorithm:
            dsl = None  # which skeleton is meant is not known
        axes: dict[str, dict[str, Node]] = {"targets": {"": node}, "precisions": {"": node}}
        for axis in axes:
            axes[axis] = keys.get(axis, _listed, axes[axis])
        if "targets" not in keys and "mma" in keys:
            axes["targets"] = {"": keys.nodes["mma"]}
        changes = keys.get("adjust", lambda value: _adjusted(value, axes), {})
        rows: list[KernelRow] = []
        for target, precision in itertools.product(*axes.values()):
            own = {key: keys.nodes[key] for key in (*_ROW_KEYS, *_OPTIONAL_ROW_KEYS) if key in keys}
            sizes = keys.get("tile", Node.named)
            tile = dict(sizes or {})
            for name in (target, precision):
                own |= changes.get(name, {})
                if "tile" in changes.get(name, {}):
                    tile |= mistakes.read(changes[name]["tile"].named) or {}
            if ("threads" in own) != ("shared_memory" in own):
                mistakes.add(
                    node.error("threads and shared_memory come together, or not at all where the kernel has a table")
                )
            # A size of a mistaken value is given all the same; which are, no mistaken `tile` says.
            given = {f"tile.{name}": value.where for name, value in tile.items()}
            own_lines = {key: value.where for key, value in own.items() if key != "tile" or sizes is not None}
            lines = {"target": axes["targets"][target].where, "precision": axes["precisions"][precision].where}
            kernel = _kernel(own, tile, variants, features, op, mistakes)
            if "targets" in keys and not target:  # they are mistaken, and so is what must be known of them
                kernel |= {"mma": None, "copy": ()}
            rows.append(
                KernelRow(
                    dsl=dsl,
                    target=target,
                    precision=precision,
                    algorithm=algorithm,
                    where=node.where,
                    key_lines=frozen(own_lines | lines | given),
                    **kernel,
                )
            )
        if seen is not None:
            seen += rows
    return rows


def _listed(node: Node) -> dict[str, Node]:
    """The items of a list of names, by name."""
    names = node.strings()  # refuses what is named twice
    if not names:
        raise node.error(f"{node.name} must name at least one")
    return dict(zip(names, node.items(), strict=True))


def _adjusted(node: Node, axes: Mapping[str, Mapping[str, Node]]) -> dict[str, dict[str, Node]]:
    """What `adjust` says, by target or precision."""

    def read(name: str, change: Node) -> dict[str, Node]:
        if not any(name in names for names in axes.values()):
            raise change.error(f"adjust names {name!r}, which is neither a target nor a precision of the row")
        found = change.fields((), optional=(*_ROW_KEYS, *_OPTIONAL_ROW_KEYS))
        if not found:
            raise change.error(f"{change.name} changes nothing")
        return found

    with Mistakes() as mistakes:
        return mistakes.entries(read, node.entries())


def _only(node: Node, variants: Variants | None, op: str) -> Mapping[str, tuple[int, ...]]:
    """The values of compile-time dims that a row serves, the first of them the operator's first."""
    if variants is None:
        return frozen({})

    def values(name: str, value: Node) -> tuple[int, ...]:
        if name not in variants.exact:
            raise value.error(
                f"only names {name!r}, which is none of the exact dims of {op}: {', '.join(variants.exact)}"
            )
        served = list(dict.fromkeys(point[name] for point in variants.ci))
        with Mistakes() as mistakes:
            found = tuple(mistakes.each(Node.integer, value.items()))
        if found[:1] != (served[0],) or not set(found) < set(served) or len(set(found)) < len(found):
            raise value.error(
                f"{name} {', '.join(map(str, found))}: wanted some but not all of {', '.join(map(str, served))}, "
                f"{served[0]} first; a row without {name} serves all of them"
            )
        return found

    with Mistakes() as mistakes:
        return frozen(mistakes.entries(values, node.entries()))


def _kernel(
    keys: dict[str, Node],
    tile: dict[str, Node],
    variants: Variants | None,
    features: Collection[str],
    op: str,
    mistakes: Mistakes,
) -> dict[str, Any]:
    """What a row says of a kernel beside which cell it is, as far as it has no mistake."""
    sizes = None if variants is None else (*tile, *variants.names)

    def size(name: str, value: Node) -> int:
        if variants is not None and name in variants.names:
            raise value.error(f"tile name {name!r} is also a compile-time dim of {op}")
        return value.integer(minimum=1)

    def feature(item: Node) -> str:
        if (name := item.string()) not in features:
            raise item.error(f"feature {name!r} is none of those {op} declares: {', '.join(features) or 'it has none'}")
        return name

    def get(key: str, reader: Callable[[Node], Any], default: Any = None) -> Any:
        found = mistakes.read(lambda: (reader(keys[key]),)) if key in keys else None
        return default if found is None else found[0]

    get("features", lambda value: mistakes.each(feature, value.items()))
    found = {
        "compute": get("compute", lambda value: value.string(WIDE_ELEMENTS)),
        "operands": get("operands", _operands, frozen({})),
        "mma": get("mma", Node.identifier),
        "copy": get("copy", Node.strings, ()),
        "tile": frozen(mistakes.entries(size, tile)),
        "expect": get("expect", read_opcodes, ()),
        "features": get("features", Node.strings, ()),
        "ci": get("ci", lambda value: value.string(CI_POINTS), CI_POINTS[0]),
        "only": get("only", lambda value: _only(value, variants, op), frozen({})),
    }
    for key in ("threads", "shared_memory", "registers", "tensor_memory"):
        found[key] = get(key, lambda value: read_expression(value, sizes))
    return found


def _operands(node: Node) -> Any:
    with Mistakes() as mistakes:
        operands = mistakes.entries(lambda _, value: value.identifier(), Fields(mistakes, node, (), ROLES).nodes)
    if not operands:
        raise node.error(f"{node.name} names no operand")
    return frozen(operands)
