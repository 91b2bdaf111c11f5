"""Which precisions reach the kernels of an operator: what its calls hand them, and in which formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msa_tiles.spec.model import Operator, Precision, Tensor, role_of

# Operators whose kernels score every block: queries reach them in bfloat16 where several keys share a byte.
WIDENING = ("index_score", "select_blocks")
_WIDE = "bfloat16"


def unreached(operator: Operator, precision: Precision, precisions: Iterable[Precision]) -> str | None:
    """Why no call of an operator reaches its kernels in this precision, which has all roles that they read, or None.

    The sentence names those of `precisions` in which calls do that have the same keys, or all where there are none.
    """
    why = _why(operator, precision)
    if why is None:
        return None
    others = [each for each in precisions if _has(operator, each) and _why(operator, each) is None]
    key = next((role for role in operator.roles if role in ("key_value", "index_key")), "query")
    alike = [each for each in others if key in precision.roles and each.roles[key] == precision.roles[key]]
    wanted = ", ".join(each.name for each in alike or others)
    return f"no call of {operator.name} reaches a kernel of {precision.name}: {why}" + (
        f"; calls reach kernels of {wanted}" if wanted else ""
    )


def group_told(name: str, operator: Operator | None, precisions: Iterable[Precision]) -> str:
    """The end of a sentence about a precision that is none: those of the group that has this name, if one has.

    These are the precisions that calls of the operator have, where there are such.
    """
    of_group = [each for each in precisions if each.group == name]
    reached = [each for each in of_group if operator and _has(operator, each) and _why(operator, each) is None]
    names = ", ".join(each.name for each in reached or of_group)
    return f", which is a group: a row names precisions, such as its {names}" if names else ""


def _has(operator: Operator, precision: Precision) -> bool:
    return all(role in precision.roles for role in _read(operator))


def _read(operator: Operator) -> list[str]:
    return [role for role in operator.roles if role != "output"]


def _why(operator: Operator, precision: Precision) -> str | None:
    formats = {role: precision.roles[role] for role in _read(operator)}
    for role, stored in formats.items():
        if stored.scale is not None and not any(_scales(operator.tensors, role)):
            return f"its kernels take no scales of {role}, which {stored.name} has"
    query, key = formats.get("query"), formats.get("index_key")
    if query is None:
        return None
    output = query.storage if query.scale is None else _WIDE
    if "output" in operator.roles and precision.output != output:
        return f"its outputs are {output}, and not {precision.output}, where its queries are {query.name}"
    if key is None:
        return None
    if key.packed > 1 and operator.name in WIDENING and query.storage != _WIDE:
        return f"its queries are widened to {_WIDE} where several index keys share a byte, as in {key.name}"
    if key.packed == 1 and key.storage != query.storage:
        return (
            f"its index keys are stored as its queries are, where no two share a byte; {query.name} is not {key.name}"
        )
    return None


def _scales(tensors: Iterable[Tensor], role: str) -> Iterator[Tensor]:
    """The tensors that hold the scales of a role."""
    return (each for each in tensors if each.dtype.endswith(".scale") and role_of(each.dtype) == role)
