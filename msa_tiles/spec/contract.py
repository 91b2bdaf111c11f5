"""Reads `operators/*.yaml`: the contract, then the kernels wanted."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msa_tiles.spec.expression import Expression, ExpressionError
from msa_tiles.spec.hardware import read_opcodes
from msa_tiles.spec.inherit import lineage
from msa_tiles.spec.model import (
    DSLS,
    POSITION_DIMS,
    ROLES,
    STRIDES,
    WIDE_ELEMENTS,
    KernelRow,
    Operator,
    Parameter,
    Roofline,
    Tensor,
    Variants,
    frozen,
)
from msa_tiles.spec.source import Node
from msa_tiles.spec.work import QUANTITIES, describe
from msa_tiles.spec.workloads import parameter_value, read_workloads

DTYPES = ("bfloat16", "float32", "int32")
PRECISION_DTYPES = (*(f"precision.{role}{part}" for role in ROLES for part in ("", ".scale")), "precision.output")
# An operator that ranks scores without writing them states their tolerance beside those of its outputs.
RANKED = "score"
# Which points of `variants.ci` a row is compiled at; the first is the default.
CI_POINTS = ("pairs", "values")
_ROW_KEYS = ("mma", "tile")
_OPTIONAL_ROW_KEYS = (
    *("compute", "operands", "threads", "shared_memory", "copy", "registers", "tensor_memory", "expect", "features"),
    "ci",
)
PARAMETER_TYPES = ("bool", "int", "float", "dim", "choice")


def read_operator(root: Node, file_stem: str) -> Operator:
    keys = root.fields(
        ("op", "summary", "reference", "dims", "inputs", "outputs", "roofline", "tolerance", "workloads", "kernels"),
        optional=("inherits", "parameters", "features", "rules", "variants"),
    )
    if (name := keys["op"].identifier()) != file_stem:
        raise keys["op"].error(f"op is {name!r} in a file named {file_stem}.yaml")
    if "inherits" in keys and keys["inherits"].identifier() != name:
        raise keys["inherits"].error(f"an operator inherits from the one of its own name beneath, here {name!r}")
    dims = _dims(keys["dims"])
    inputs = {tensor: _tensor(tensor, node, dims) for tensor, node in keys["inputs"].named().items()}
    outputs = {tensor: _tensor(tensor, node, dims) for tensor, node in keys["outputs"].named().items()}
    parameters = {}
    if "parameters" in keys:
        parameters = {p: _parameter(p, node, dims) for p, node in keys["parameters"].named().items()}
    variants = _variants(keys.get("variants"), dims, keys["dims"])
    rules = tuple(_expression(rule, dims) for rule in keys["rules"].items()) if "rules" in keys else ()
    roofline_keys = keys["roofline"].fields(("flops", "bytes"))
    roofline = Roofline(
        flops=_expression(roofline_keys["flops"], (*dims, *QUANTITIES)),
        bytes=_expression(roofline_keys["bytes"], (*dims, *QUANTITIES)),
    )
    _check_dims_are_used(keys["dims"], dims, [*inputs.values(), *outputs.values()], rules, roofline, parameters)
    verify, bench = read_workloads(keys["workloads"], dims, parameters, inputs, variants)
    features = {}
    if "features" in keys:
        features = {feature: node.string() for feature, node in keys["features"].named().items()}
    return Operator(
        name=name,
        summary=keys["summary"].string(),
        reference=_reference(keys["reference"]),
        dims=frozen(dims),
        inputs=frozen(inputs),
        outputs=frozen(outputs),
        parameters=frozen(parameters),
        features=frozen(features),
        rules=rules,
        variants=variants,
        verify=verify,
        bench=bench,
        roofline=roofline,
        tolerance=frozen({p: _tolerance(node, outputs) for p, node in keys["tolerance"].entries().items()}),
        kernels=tuple(
            row
            for each in lineage(root)
            if "kernels" in each.entries()
            for node in each.entries()["kernels"].items()
            for row in _rows(node, variants, features, name)
        ),
        where=root.where,
    )


def _reference(node: Node) -> str:
    """The function of `msa_tiles.reference` that an operator is compared with."""
    if (name := node.identifier()) not in (known := _references()):
        raise node.error(f"reference {name!r} is no function of msa_tiles.reference; it has {', '.join(known)}")
    return name


@functools.lru_cache(maxsize=1)
def _references() -> tuple[str, ...]:
    """What `msa_tiles.reference` exports, read from its text: importing it would import torch."""
    text = (Path(__file__).parents[1] / "reference" / "__init__.py").read_text(encoding="utf-8")
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["__all__"]:
            return tuple(ast.literal_eval(statement.value))
    raise RuntimeError("msa_tiles.reference does not say what it exports")


def _dims(node: Node) -> dict[str, tuple[int, ...] | Expression | None]:
    dims: dict[str, tuple[int, ...] | Expression | None] = {}
    entries = node.named()
    for name, value in entries.items():
        if name in QUANTITIES:
            raise value.error(f"dim {name!r} has the name of a roofline quantity")
        if value.is_list():
            dims[name] = value.integers(minimum=0)
            if not dims[name]:
                raise value.error(f"dim {name!r} must list at least one value, or be runtime")
        elif value.string() == "runtime":
            dims[name] = None
        elif name in POSITION_DIMS:
            raise value.error(f"dim {name!r} follows from a call's lengths: write runtime")
        else:
            dims[name] = _expression(value, [other for other in entries if other != name])
    return dims


def _expression(node: Node, known: Any) -> Expression:
    value = node.scalar()
    try:
        expression = Expression(str(node.integer(minimum=0)) if isinstance(value, int) else node.string())
    except ExpressionError as error:
        raise node.error(f"{node.name}: {error}") from error
    if unknown := sorted(expression.names - set(known)):
        raise node.error(f"{node.name} uses {', '.join(unknown)}; known names: {', '.join(known)}")
    return expression


def _tensor(name: str, node: Node, dims: Any) -> Tensor:
    keys = node.fields(("shape", "dtype"), optional=("strides", "optional", "pad", "note"))
    dtype = keys["dtype"].string((*DTYPES, *PRECISION_DTYPES))
    return Tensor(
        name=name,
        shape=tuple(_expression(item, dims) for item in keys["shape"].items()),
        dtype=dtype,
        strides=keys["strides"].string(STRIDES) if "strides" in keys else "contiguous",
        optional=keys["optional"].boolean() if "optional" in keys else False,
        pad=keys["pad"].integer() if "pad" in keys else None,
        note=keys["note"].string() if "note" in keys else "",
        where=node.where,
    )


def _parameter(name: str, node: Node, dims: Any) -> Parameter:
    keys = node.fields(("type",), optional=("default", "choices"))
    kind = keys["type"].string(PARAMETER_TYPES)
    if kind == "dim" and name not in dims:
        raise node.error(f"parameter {name!r} has type dim, but the operator has no such dim")
    if kind != "dim" and name in dims:
        raise node.error(f"parameter {name!r} is a dim: its type must be dim")
    if (kind == "choice") != ("choices" in keys):
        raise node.error(f"parameter {name!r} needs `choices` exactly when its type is choice")
    choices = keys["choices"].strings() if "choices" in keys else ()
    default = None
    if "default" in keys:
        default = None if keys["default"].scalar() is None else parameter_value(keys["default"], kind, choices)
    return Parameter(name, kind, "default" not in keys, default, choices, node.where)


def _variants(node: Node | None, dims: dict[str, Any], dims_node: Node) -> Variants:
    listed = [name for name, values in dims.items() if isinstance(values, tuple)]
    if node is None:
        if listed:
            raise dims_node.error(f"dims {', '.join(listed)} list values, so the operator needs `variants`")
        return Variants((), (), (), (frozen({}),))
    keys = node.fields(("ci",), optional=("exact", "capacity", "scaled"))
    exact = keys["exact"].strings(listed) if "exact" in keys else ()
    capacity = keys["capacity"].strings(listed) if "capacity" in keys else ()
    names = (*exact, *capacity)
    if len(set(names)) != len(names) or set(names) != set(listed):
        raise node.error(f"variants must name each of {', '.join(listed)} once, under exact or capacity")
    scaled = keys["scaled"].strings(exact) if "scaled" in keys else ()
    points = []
    for item in keys["ci"].items():
        fields = item.fields(names)
        point = {name: fields[name].integer() for name in names}
        for name, value in point.items():
            if value not in dims[name]:
                raise fields[name].error(f"{name} {value} is none of its values {', '.join(map(str, dims[name]))}")
        if point in points:
            raise item.error(f"the point {describe(point)} stands twice in variants.ci")
        points.append(point)
    _check_pairwise(keys["ci"], names, dims, points)
    return Variants(exact, capacity, scaled, tuple(frozen(point) for point in points))


def _check_pairwise(node: Node, names: tuple[str, ...], dims: dict[str, Any], points: list[dict[str, int]]) -> None:
    first = {name: dims[name][0] for name in names}
    if not points or points[0] != first:
        raise node.error(f"variants.ci must begin with the first value of each dim: {describe(first)}")
    for count in (1, 2):
        for chosen in itertools.combinations(names, count):
            for values in itertools.product(*(dims[name] for name in chosen)):
                wanted = dict(zip(chosen, values, strict=True))
                if not any(wanted.items() <= point.items() for point in points):
                    raise node.error(f"no point of variants.ci has {describe(wanted)}; every pair of values must meet")


def _check_dims_are_used(node: Node, dims: Any, tensors: Any, rules: Any, roofline: Roofline, parameters: Any) -> None:
    used = set(parameters) | roofline.flops.names | roofline.bytes.names
    for expression in (*rules, *(entry for tensor in tensors for entry in tensor.shape)):
        used |= expression.names
    for value in dims.values():
        used |= value.names if isinstance(value, Expression) else set()
    for name, entry in node.entries().items():
        if name not in used and not isinstance(dims[name], tuple):  # compile-time dims reach the kernel anyway
            raise entry.error(f"dim {name!r} is used by no shape, rule, parameter or roofline")


def _tolerance(node: Node, outputs: Any) -> Any:
    keys = node.fields(outputs, optional=(RANKED,))
    return frozen({name: bound.number(minimum=0) for name, bound in keys.items()})


def _rows(node: Node, variants: Variants, features: dict[str, str], op: str) -> Iterator[KernelRow]:
    """The cells of one row: one for each of its targets and precisions, with what `adjust` says of either.

    A row without targets is one of the target "": of every target that can run it.
    """
    keys = node.fields(
        ("dsl", "precisions", *_ROW_KEYS), optional=("targets", "algorithm", "adjust", *_OPTIONAL_ROW_KEYS)
    )
    given = [axis for axis in ("targets", "precisions") if axis in keys]
    axes: dict[str, dict[str, Node]] = {"targets": {"": keys["mma"]}}
    axes |= {axis: {item.string(): item for item in _listed(keys[axis])} for axis in given}
    adjusted = keys["adjust"].entries() if "adjust" in keys else {}
    for name, change in adjusted.items():
        if not any(name in names for names in axes.values()):
            raise change.error(f"adjust names {name!r}, which is neither a target nor a precision of the row")
    changes = {name: change.fields((), optional=(*_ROW_KEYS, *_OPTIONAL_ROW_KEYS)) for name, change in adjusted.items()}
    for name, change in adjusted.items():
        if not changes[name]:
            raise change.error(f"{change.name} changes nothing")
    for target, precision in itertools.product(*axes.values()):
        own = {key: keys[key] for key in (*_ROW_KEYS, *_OPTIONAL_ROW_KEYS) if key in keys}
        tile = keys["tile"].named()
        for name in (target, precision):
            own |= changes.get(name, {})
            if "tile" in changes.get(name, {}):
                tile |= changes[name]["tile"].named()
        if ("threads" in own) != ("shared_memory" in own):
            raise node.error("threads and shared_memory come together, or not at all where the kernel has a table")
        lines = {"target": axes["targets"][target].where, "precision": axes["precisions"][precision].where}
        yield KernelRow(
            dsl=keys["dsl"].string(DSLS),
            target=target,
            precision=precision,
            algorithm=keys["algorithm"].identifier() if "algorithm" in keys else "",
            where=node.where,
            key_lines=frozen({key: value.where for key, value in own.items()} | lines),
            **_kernel(own, tile, variants, features, op),
        )


def _listed(node: Node) -> list[Node]:
    node.strings()  # refuses what is named twice
    if not node.items():
        raise node.error(f"{node.name} must name at least one")
    return node.items()


def _kernel(
    keys: dict[str, Node], tile: dict[str, Node], variants: Variants, features: dict[str, str], op: str
) -> dict[str, Any]:
    """What a row says of a kernel beside which cell it is."""
    for name, value in tile.items():
        if name in variants.names:
            raise value.error(f"tile name {name!r} is also a compile-time dim of {op}")
    sizes = (*tile, *variants.names)
    if "features" in keys:
        for item in keys["features"].items():
            if (feature := item.string()) not in features:
                raise item.error(f"feature {feature!r} is none of those {op} declares: {', '.join(features)}")
    operands = keys["operands"].fields((), optional=ROLES) if "operands" in keys else {}
    if "operands" in keys and not operands:
        raise keys["operands"].error(f"{keys['operands'].name} names no operand")
    return {
        "compute": keys["compute"].string(WIDE_ELEMENTS) if "compute" in keys else None,
        "operands": frozen({role: value.identifier() for role, value in operands.items()}),
        "mma": keys["mma"].identifier(),
        "copy": keys["copy"].strings() if "copy" in keys else (),
        "tile": frozen({name: value.integer(minimum=1) for name, value in tile.items()}),
        "threads": _expression(keys["threads"], sizes) if "threads" in keys else None,
        "shared_memory": _expression(keys["shared_memory"], sizes) if "shared_memory" in keys else None,
        "registers": _expression(keys["registers"], sizes) if "registers" in keys else None,
        "tensor_memory": _expression(keys["tensor_memory"], sizes) if "tensor_memory" in keys else None,
        "expect": read_opcodes(keys["expect"]) if "expect" in keys else (),
        "features": keys["features"].strings() if "features" in keys else (),
        "ci": keys["ci"].string(CI_POINTS) if "ci" in keys else CI_POINTS[0],
    }
