"""Reads `precisions.yaml`: the formats of single tensors, then their combinations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from msa_tiles.names import unknown
from msa_tiles.spec.mistakes import Mistakes
from msa_tiles.spec.model import EACH_TOKEN, ROLES, STORAGE_BITS, Format, Precision, Scale
from msa_tiles.spec.source import Fields, Node


@dataclass
class Partly:
    """What of the files has no mistake, and the names of all precisions; None where these cannot be read."""

    formats: Mapping[str, Format] = field(default_factory=dict)
    precisions: Mapping[str, Precision] = field(default_factory=dict)
    names: tuple[str, ...] | None = None


SCALE_GRANULARITIES = ("tensor", "head", EACH_TOKEN, "group")


def read_precisions(
    root: Node, *above: Node, partly: Partly | None = None
) -> tuple[dict[str, Format], dict[str, Precision]]:
    """Formats by name, and precisions by name. Those of files `above` go before those of the same names.

    Raises SpecError with every mistake of the files; `partly` gets what has none also then.
    """
    parts = ("formats", "precisions")
    with Mistakes() as mistakes:
        files = [Fields(mistakes, root, parts), *(Fields(mistakes, each, (), parts) for each in above)]
        nodes = {part: {k: v for keys in files for k, v in keys.get(part, Node.named, {}).items()} for part in parts}
        formats = mistakes.entries(_format, nodes["formats"])
        groups = {format.group for format in formats.values()}
        # A format with a mistake is known by its name all the same.
        known = dict.fromkeys(nodes["formats"]) | formats
        precisions: dict[str, Precision] = {}
        misnamed = False
        for name, node in nodes["precisions"].items():
            precision = mistakes.read(_precision, name, node, known)
            if precision is None:
                continue
            if name in groups and name != precision.group:
                misnamed = True
                mistakes.add(node.error(f"precision {name!r} has the name of a group that it does not belong to"))
            for other in precisions.values():
                if (other.roles, other.output, other.multiply) == (
                    precision.roles, precision.output, precision.multiply
                ):  # fmt: skip
                    mistakes.add(node.error(f"precision {name!r} is the same combination as {other.name!r}"))
            precisions[name] = precision
        if partly is not None:
            partly.formats, partly.precisions = formats, precisions
            named = [keys.get("precisions", Node.named) for keys in files if keys is files[0] or "precisions" in keys]
            if None not in named and not misnamed:
                partly.names = tuple(dict.fromkeys(name for names in named for name in names))
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
    with Mistakes() as mistakes:
        keys = Fields(
            mistakes, node, ("summary", "group", "element", "bits", "storage"), optional=("packed", "scale", "operand")
        )
        summary = keys.get("summary", Node.string)
        group, element = keys.get("group", Node.identifier), keys.get("element", Node.identifier)
        bits = keys.get("bits", lambda value: value.integer(minimum=1))
        storage = keys.get("storage", lambda value: value.string(STORAGE_BITS))
        packed = keys.get("packed", lambda value: value.integer(minimum=2), 1)
        scale = keys.get("scale", _scale)
        operand = keys.get("operand", Node.identifier, name)
    if bits * packed != STORAGE_BITS[storage]:
        raise keys.nodes["bits"].error(
            f"{packed} x {bits} bits do not fill one {storage} of {STORAGE_BITS[storage]} bits"
        )
    return Format(
        name=name,
        summary=summary,
        group=group,
        element=element,
        bits=bits,
        storage=storage,
        packed=packed,
        scale=scale,
        operand=operand,
        where=node.where,
    )


def _precision(name: str, node: Node, formats: Mapping[str, Format | None]) -> Precision | None:
    """None where a format that it names has a mistake of its own."""
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("query", "multiply", "output"), optional=ROLES[1:])
        names = {role: keys.get(role, lambda value: value.string(formats)) for role in ROLES if role in keys}
        multiply = keys.get("multiply", Node.identifier)
        output = keys.get("output", lambda value: value.string(("bfloat16", "float32")))
        if len(names) < 2:
            mistakes.add(node.error(f"precision {name!r} needs key_value, index_key or both"))
    if len(names) == len(ROLES) and names["key_value"] != names["index_key"]:
        raise keys.nodes["index_key"].error(
            "a precision for attention and the indexer has one format for key_value and index_key; a call may have two "
            "precisions"
        )
    roles = {role: formats[format_name] for role, format_name in names.items()}
    query = roles["query"]
    if query is None or None in roles.values():
        return None
    return Precision(
        name=name,
        query=query,
        key_value=roles.get("key_value"),
        index_key=roles.get("index_key"),
        multiply=multiply,
        output=output,
        where=node.where,
        multiply_where=keys.nodes["multiply"].where,
    )


def _scale(node: Node) -> Scale:
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("dtype", "per"), optional=("group", "global_dtype"))
        dtype = keys.get("dtype", lambda value: value.string(STORAGE_BITS))
        per = keys.get("per", lambda value: value.strings(SCALE_GRANULARITIES))
        group = keys.get("group", lambda value: value.integer(minimum=2), 0)
        global_dtype = keys.get("global_dtype", lambda value: value.string(("float32",)))
    if ("group" in per) != ("group" in keys):
        raise keys.nodes["per"].error(f"{node.name}.group must be given exactly when scales are kept per group")
    return Scale(dtype=dtype, per=per, group=group, global_dtype=global_dtype, where=node.where)
