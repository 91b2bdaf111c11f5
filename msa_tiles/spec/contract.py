"""Reads `operators/*.yaml`: the contract; the kernels wanted, in `rows`."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msa_tiles.spec.expression import Expression, read_expression
from msa_tiles.spec.inherit import lineage
from msa_tiles.spec.mistakes import Mistakes
from msa_tiles.spec.model import (
    POSITION_DIMS,
    ROLES,
    STRIDES,
    KernelRow,
    Operator,
    Parameter,
    Roofline,
    Tensor,
    Variants,
    frozen,
)
from msa_tiles.spec.rows import read_rows
from msa_tiles.spec.source import Fields, Node
from msa_tiles.spec.work import QUANTITIES, describe
from msa_tiles.spec.workloads import parameter_value, read_workloads
from msa_tiles.syntax import tree_of

T = TypeVar("T")
MOST_TOLD = 8  # pairs of values that never meet
DTYPES = ("bfloat16", "float32", "int32")
PRECISION_DTYPES = (*(f"precision.{role}{part}" for role in ROLES for part in ("", ".scale")), "precision.output")
# An operator that ranks scores without writing them states their tolerance beside those of its outputs.
RANKED = "score"
PARAMETER_TYPES = ("bool", "int", "float", "dim", "choice")


def read_operator(root: Node, file_stem: str, seen: list[KernelRow] | None = None) -> Operator:
    """Raises SpecError with every mistake of the file; what depends on a mistaken part is read when that is right.

    `seen` gets its rows also where it raises, without what is mistaken.
    """
    with Mistakes() as mistakes:
        keys = Fields(
            mistakes,
            root,
            (
                "op",
                "summary",
                "reference",
                "dims",
                "inputs",
                "outputs",
                "roofline",
                "tolerance",
                "workloads",
                "kernels",
            ),
            optional=("inherits", "parameters", "features", "rules", "variants"),
        )
        name = keys.get("op", lambda node: _name(node, file_stem))
        # What another operator says is nothing of this one's.
        heir = bool(keys.get("inherits", lambda node: _inherited(node, file_stem)))
        summary, reference = keys.get("summary", Node.string), keys.get("reference", _reference)
        dims = keys.get("dims", _dims)
        # Names in the other parts are those of dims that have a mistake, too; None where none is known.
        known = keys.get("dims", lambda node: dict.fromkeys(node.entries())) if dims is None else dims
        inputs = keys.get("inputs", lambda node: _each(node, lambda tensor, value: _tensor(tensor, value, known)))
        outputs = keys.get("outputs", lambda node: _each(node, lambda tensor, value: _tensor(tensor, value, known)))
        settings = keys.get("parameters", Node.named, {})
        parameters: Any = mistakes.entries(lambda p, value: _parameter(p, value, known), settings)
        variants: Any = None if dims is None else mistakes.read(_variants, keys.nodes.get("variants"), dims, keys)
        rules = keys.get("rules", lambda node: _expressions(node, known), ())
        roofline = keys.get("roofline", lambda node: _roofline(node, known))
        used = True
        if None not in (dims, inputs, outputs, rules, roofline):
            tensors = [*inputs.values(), *outputs.values()]
            used = mistakes.passes(_check_dims_are_used, keys.nodes["dims"], dims, tensors, rules, roofline, settings)
        workloads: Any = None
        if used and None not in (dims, variants):
            reads_ids = "block_indices" in keys.get("inputs", Node.entries, {})
            known = dict.fromkeys(settings) | parameters
            workloads = keys.get("workloads", lambda node: read_workloads(node, dims, known, reads_ids, variants))
        features = keys.get("features", lambda node: _each(node, lambda _, value: value.string()))
        declared = keys.get("features", Node.entries, {})
        tolerance = keys.get("tolerance", lambda node: _tolerances(node, keys.nodes.get("outputs")))
        written = mistakes.read(_written, root, heir) or []
        kernels = mistakes.each(lambda row: read_rows(row, variants, declared, file_stem, seen), written)
    return Operator(
        name=name,
        summary=summary,
        reference=reference,
        dims=frozen(dims),
        inputs=frozen(inputs),
        outputs=frozen(outputs),
        parameters=frozen(parameters),
        features=frozen(features or {}),
        rules=rules,
        variants=variants,
        verify=workloads[0],
        bench=workloads[1],
        roofline=roofline,
        tolerance=frozen(tolerance),
        kernels=tuple(itertools.chain.from_iterable(kernels)),
        where=root.where,
    )


def _written(root: Node, heir: bool) -> list[Node]:
    """The rows of a file and, if it is an heir, of those that it inherits from."""
    files = [each.entries() for each in lineage(root) if heir or each.where.file == root.where.file]
    return [row for entries in files if "kernels" in entries for row in entries["kernels"].items()]


def _each(node: Node, reader: Callable[[str, Node], T]) -> dict[str, T]:
    with Mistakes() as mistakes:
        return mistakes.entries(reader, node.named())


def _name(node: Node, file_stem: str) -> str:
    if (name := node.identifier()) != file_stem:
        raise node.error(f"op is {name!r} in a file named {file_stem}.yaml")
    return name


def _inherited(node: Node, name: str) -> bool:
    if node.identifier() != name:
        raise node.error(f"an operator inherits from the one of its own name beneath, here {name!r}")
    return True


def _roofline(node: Node, dims: Any) -> Roofline:
    known = None if dims is None else (*dims, *QUANTITIES)
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("flops", "bytes"))
        flops, moved = (keys.get(key, lambda value: read_expression(value, known)) for key in ("flops", "bytes"))
    return Roofline(flops=flops, bytes=moved)


def _tolerances(node: Node, outputs: Node | None) -> dict[str, Any]:
    names = None if outputs is None else list(outputs.entries())
    with Mistakes() as mistakes:
        return mistakes.entries(lambda _, bounds: _tolerance(bounds, names), node.entries())


def _reference(node: Node) -> str:
    """The function of `msa_tiles.reference` that an operator is compared with."""
    if (name := node.identifier()) not in (known := _references()):
        raise node.error(f"reference {name!r} is no function of msa_tiles.reference; it has {', '.join(known)}")
    return name


@functools.lru_cache(maxsize=1)
def _references() -> tuple[str, ...]:
    """What `msa_tiles.reference` exports, read from its text: importing it would import torch."""
    text = (Path(__file__).parents[1] / "reference" / "__init__.py").read_text(encoding="utf-8")
    for statement in tree_of(text).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["__all__"]:
            return tuple(ast.literal_eval(statement.value))
    raise RuntimeError("msa_tiles.reference does not say what it exports")


def _dims(node: Node) -> dict[str, tuple[int, ...] | Expression | None]:
    entries = node.named()

    def read(name: str, value: Node) -> tuple[int, ...] | Expression | None:
        if name in QUANTITIES:
            raise value.error(f"dim {name!r} has the name of a roofline quantity")
        if value.is_list():
            if not (listed := value.integers(minimum=0)):
                raise value.error(f"dim {name!r} must list at least one value, or be runtime")
            return listed
        if value.string() == "runtime":
            return None
        if name in POSITION_DIMS:
            raise value.error(f"dim {name!r} follows from a call's lengths: write runtime")
        return read_expression(value, [other for other in entries if other != name])

    with Mistakes() as mistakes:
        return mistakes.entries(read, entries)


def _expressions(node: Node, known: Any) -> tuple[Expression, ...]:
    with Mistakes() as mistakes:
        return tuple(mistakes.each(lambda item: read_expression(item, known), node.items()))


def _tensor(name: str, node: Node, dims: Any) -> Tensor:
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("shape", "dtype"), optional=("strides", "optional", "pad", "note"))
        shape = keys.get("shape", lambda value: _expressions(value, dims))
        dtype = keys.get("dtype", lambda value: value.string((*DTYPES, *PRECISION_DTYPES)))
        strides = keys.get("strides", lambda value: value.string(STRIDES), "contiguous")
        optional = keys.get("optional", Node.boolean, False)
        pad = keys.get("pad", Node.integer)
        note = keys.get("note", Node.string, "")
    return Tensor(
        name=name, shape=shape, dtype=dtype, strides=strides, optional=optional, pad=pad, note=note, where=node.where
    )


def _parameter(name: str, node: Node, dims: Any) -> Parameter:
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("type",), optional=("default", "choices"))
        kind = keys.get("type", lambda value: value.string(PARAMETER_TYPES))
        choices = keys.get("choices", Node.strings, ())
    if dims is not None and kind == "dim" and name not in dims:
        raise node.error(f"parameter {name!r} has type dim, but the operator has no such dim")
    if dims is not None and kind != "dim" and name in dims:
        raise node.error(f"parameter {name!r} is a dim: its type must be dim")
    if (kind == "choice") != ("choices" in keys):
        raise node.error(f"parameter {name!r} needs `choices` exactly when its type is choice")
    default = None
    if "default" in keys and keys.nodes["default"].scalar() is not None:
        default = parameter_value(keys.nodes["default"], kind, choices)
    return Parameter(name, kind, "default" not in keys, default, choices, node.where)


def _variants(node: Node | None, dims: dict[str, Any], root: Fields) -> Variants:
    listed = [name for name, values in dims.items() if isinstance(values, tuple)]
    if node is None:
        if listed:
            raise root.nodes["dims"].error(f"dims {', '.join(listed)} list values, so the operator needs `variants`")
        return Variants((), (), (), (frozen({}),))
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("ci",), optional=("exact", "capacity", "scaled"))
        exact = keys.get("exact", lambda value: value.strings(listed), ())
        capacity = keys.get("capacity", lambda value: value.strings(listed), ())
    names = (*exact, *capacity)
    if len(set(names)) != len(names) or set(names) != set(listed):
        raise node.error(f"variants must name each of {', '.join(listed)} once, under exact or capacity")

    def value_of(name: str, value: Node) -> int:
        if (number := value.integer()) not in dims[name]:
            raise value.error(f"{name} {number} is none of its values {', '.join(map(str, dims[name]))}")
        return number

    def point_of(item: Node) -> dict[str, int]:
        with Mistakes() as mistakes:
            fields = Fields(mistakes, item, names)
            found = mistakes.entries(value_of, fields.nodes)
        return {name: found[name] for name in names}

    with Mistakes() as mistakes:
        scaled = mistakes.read(keys.nodes["scaled"].strings, exact) if "scaled" in keys else ()
        items = keys.nodes["ci"].items()
        points: list[dict[str, int]] = []
        for item in items:
            point = mistakes.read(point_of, item)
            if point in points:
                mistakes.add(item.error(f"the point {describe(point)} stands twice in variants.ci"))
            elif point is not None:
                points.append(point)
    _check_pairwise(keys.nodes["ci"], names, dims, points)
    return Variants(exact, capacity, scaled or (), tuple(frozen(point) for point in points))


def _check_pairwise(node: Node, names: tuple[str, ...], dims: dict[str, Any], points: list[dict[str, int]]) -> None:
    first = {name: dims[name][0] for name in names}
    if not points or points[0] != first:
        raise node.error(f"variants.ci must begin with the first value of each dim: {describe(first)}")
    missing = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(names, count) for count in (1, 2)):
        for values in itertools.product(*(dims[name] for name in chosen)):
            wanted = dict(zip(chosen, values, strict=True))
            if not any(wanted.items() <= point.items() for point in points):
                missing.append(describe(wanted))
    if missing:
        several = " or ".join(missing[:MOST_TOLD]) + (
            f" or {len(missing) - MOST_TOLD} more" * (len(missing) > MOST_TOLD)
        )
        raise node.error(f"no point of variants.ci has {several}; every pair of values must meet")


def _check_dims_are_used(node: Node, dims: Any, tensors: Any, rules: Any, roofline: Roofline, parameters: Any) -> None:
    used = set(parameters) | roofline.flops.names | roofline.bytes.names
    for expression in (*rules, *(entry for tensor in tensors for entry in tensor.shape)):
        used |= expression.names
    for value in dims.values():
        used |= value.names if isinstance(value, Expression) else set()
    with Mistakes() as mistakes:
        for name, entry in node.entries().items():
            if name not in used and not isinstance(dims[name], tuple):  # compile-time dims reach the kernel anyway
                mistakes.add(entry.error(f"dim {name!r} is used by no shape, rule, parameter or roofline"))


def _tolerance(node: Node, outputs: Any) -> Any:
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, outputs, optional=(RANKED,)).nodes if outputs is not None else node.entries()
        return frozen(mistakes.entries(lambda _, bound: bound.number(minimum=0), keys))
