"""Reads `precisions.yaml`: the formats of single tensors, then their combinations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msa_tiles.names import unknown
from msa_tiles.spec.model import EACH_TOKEN, ROLES, Format, Precision, Scale
from msa_tiles.spec.source import Node

STORAGE_BITS = {"bfloat16": 16, "float32": 32, "float8_e4m3fn": 8, "float8_e8m0fnu": 8, "uint8": 8, "int8": 8}
SCALE_GRANULARITIES = ("tensor", "head", EACH_TOKEN, "group")


def read_precisions(root: Node, *above: Node) -> tuple[dict[str, Format], dict[str, Precision]]:
    """Formats by name, and precisions by name. Those of files `above` go before those of the same names."""
    files = [root.fields(("formats", "precisions")), *(each.fields((), ("formats", "precisions")) for each in above)]
    nodes = {part: {k: v for keys in files if part in keys for k, v in keys[part].named().items()} for part in files[0]}
    formats = {name: _format(name, node) for name, node in nodes["formats"].items()}
    precisions: dict[str, Precision] = {}
    for name, node in nodes["precisions"].items():
        precisions[name] = precision = _precision(name, node, formats)
        if name in {format.group for format in formats.values()} and name != precision.group:
            raise node.error(f"precision {name!r} has the name of a group that it does not belong to")
        for other in list(precisions.values())[:-1]:
            if (other.roles, other.output, other.multiply) == (precision.roles, precision.output, precision.multiply):
                raise node.error(f"precision {name!r} is the same combination as {other.name!r}")
    return formats, precisions


def named(names: Iterable[str], groups: Mapping[str, str], known_groups: Collection[str]) -> list[str]:
    """The precisions that are meant by names of precisions and of groups. `groups` holds the group of each precision.

    Raises ValueError for a name that is neither.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in groups and name not in known_groups:
            raise ValueError(unknown("precision", name, (*groups, *known_groups)))
        found |= dict.fromkeys(precision for precision, group in groups.items() if name in (precision, group))
    return list(found)


def _format(name: str, node: Node) -> Format:
    keys = node.fields(("summary", "group", "element", "bits", "storage"), optional=("packed", "scale", "operand"))
    bits = keys["bits"].integer(minimum=1)
    storage = keys["storage"].string(STORAGE_BITS)
    packed = keys["packed"].integer(minimum=2) if "packed" in keys else 1
    if bits * packed != STORAGE_BITS[storage]:
        raise keys["bits"].error(f"{packed} x {bits} bits do not fill one {storage} of {STORAGE_BITS[storage]} bits")
    return Format(
        name=name,
        summary=keys["summary"].string(),
        group=keys["group"].identifier(),
        element=keys["element"].identifier(),
        bits=bits,
        storage=storage,
        packed=packed,
        scale=_scale(keys["scale"]) if "scale" in keys else None,
        operand=keys["operand"].identifier() if "operand" in keys else name,
        where=node.where,
    )


def _precision(name: str, node: Node, formats: Mapping[str, Format]) -> Precision:
    keys = node.fields(("query", "multiply", "output"), optional=ROLES[1:])
    roles = {role: formats[keys[role].string(formats)] for role in ROLES if role in keys}
    if len(roles) < 2:
        raise node.error(f"precision {name!r} needs key_value, index_key or both")
    if len(roles) == len(ROLES) and roles["key_value"] != roles["index_key"]:
        raise keys["index_key"].error(
            "a precision for attention and the indexer has one format for key_value and index_key; a call may have two "
            "precisions"
        )
    return Precision(
        name=name,
        query=roles["query"],
        key_value=roles.get("key_value"),
        index_key=roles.get("index_key"),
        multiply=keys["multiply"].identifier(),
        output=keys["output"].string(("bfloat16", "float32")),
        where=node.where,
        multiply_where=keys["multiply"].where,
    )


def _scale(node: Node) -> Scale:
    keys = node.fields(("dtype", "per"), optional=("group", "global_dtype"))
    per = keys["per"].strings(SCALE_GRANULARITIES)
    if ("group" in per) != ("group" in keys):
        raise keys["per"].error(f"{node.name}.group must be given exactly when scales are kept per group")
    return Scale(
        dtype=keys["dtype"].string(STORAGE_BITS),
        per=per,
        group=keys["group"].integer(minimum=2) if "group" in keys else 0,
        global_dtype=keys["global_dtype"].string(("float32",)) if "global_dtype" in keys else None,
        where=node.where,
    )
