"""`index.json`: what the runtime, the verification grid and the benchmarks know without reading a spec."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_tiles.codegen.plan import KernelPlan
from msa_tiles.files import from_json
from msa_tiles.paths import generated_dir
from msa_tiles.spec import Expression, Location, Operator, Precision, Specs, Workload

INDEX = "index.json"
REQUESTED = "requested"  # the targets that are generated on request and were requested of a tree
FORMAT = 2
_NAMED = ("targets", "formats", "precisions")
_WIDTH = 240  # a workload fits


def index(
    specs: Specs, plans: Sequence[KernelPlan], digests: Mapping[str, str], paths: Mapping[str, str]
) -> dict[str, Any]:
    """The index of these plans; `digests` and `paths`, below the output directory, are by cell."""
    return {
        "format": FORMAT,
        "targets": {name: _plain(target) for name, target in specs.targets.items()},
        "formats": {name: _plain(format) for name, format in specs.formats.items()},
        "precisions": {name: _precision(precision) for name, precision in specs.precisions.items()},
        "cells": [_cell(plan, specs.operators[plan.op], digests[plan.cell], paths[plan.cell]) for plan in plans],
    }


def is_known(plan: KernelPlan, operator: Operator, digest: str, known: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the entries that are known have this very cell, in whatever file."""
    entry = known.get(plan.cell)
    return entry is not None and _as_read(_cell(plan, operator, digest, entry["file"])) == entry


def added(made: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """An index without the targets, formats and precisions that are the same in what lies beneath."""
    parts = {part: _as_read(made[part]).items() for part in _NAMED}
    return {**made, **{p: {n: e for n, e in parts[p] if beneath[p].get(n) != e} for p in _NAMED}}


def joined(directories: Iterable[Path]) -> dict[str, Any]:
    """The indices of directories of kernels as one; what a later one has goes before the same of an earlier one.

    Raises ValueError for one that is missing or malformed.
    """
    found: dict[str, Any] = {part: {} for part in _NAMED}
    cells: dict[str, Any] = {}
    for file in (directory / INDEX for directory in directories):
        tree = "" if file.parent == generated_dir() else f" --tree {file.parent.parent}"
        again = f"run `msa-tiles generate{tree}`"
        try:
            document = from_json(file.read_text(encoding="utf-8"))
            for part in _NAMED:
                found[part] |= document[part]
            cells |= {cell["id"]: cell for cell in document["cells"]}
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror}); {again}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is no index of kernels; {again}") from error
    return {**found, "cells": list(cells.values())}


def _as_read(value: Any) -> Any:
    """A value as it is once it was written and read again."""
    return json.loads(json.dumps(value))


def _precision(precision: Precision) -> dict[str, Any]:
    formats = {role: stored.name for role, stored in precision.roles.items()}
    return {**formats, "multiply": precision.multiply, "output": precision.output}


def _cell(plan: KernelPlan, operator: Operator, digest: str, path: str) -> dict[str, Any]:
    return {
        "id": plan.cell,
        "op": plan.op,
        "dsl": plan.dsl,
        "target": plan.target,
        "precision": plan.precision,
        "algorithm": plan.algorithm,
        "reads": list(operator.roles),
        "operands": _plain(plan.operands),
        "mma": plan.mma,
        "compute": plan.compute,
        "file": path,
        "digest": digest,
        "summary": operator.summary,
        "variants": _plain(plan.variants),
        "capacity": list(plan.capacity),
        "ci": _plain(plan.ci),
        "tile": _plain(plan.tile),
        "threads": str(plan.threads_formula) if plan.threads_formula else None,
        "shared_memory": str(plan.shared_memory_formula) if plan.shared_memory_formula else None,
        "registers": str(plan.registers_formula) if plan.registers_formula else None,
        "tensor_memory": str(plan.tensor_memory_formula) if plan.tensor_memory_formula else None,
        "expect": list(plan.expected_opcodes),
        "forbid": list(plan.forbidden_opcodes),
        "features": list(plan.features),
        "refuses": {name: why for name, why in operator.features.items() if name not in plan.features},
        "tolerance": _plain(operator.tolerance[plan.precision]),
        "roofline": _plain(operator.roofline),
        "workloads": {
            "verify": [_workload(workload) for workload in operator.verify],
            "bench": [_workload(workload) for workload in operator.bench],
        },
    }


def _workload(workload: Workload) -> dict[str, Any]:
    return _plain(workload)


def _plain(value: Any) -> Any:
    """The value as JSON knows it; where something was declared is no part of what it is."""
    if isinstance(value, Expression):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _plain(item) for name, item in fields if not isinstance(item, Location)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def dumps(value: Any, indent: str = "") -> str:
    """JSON in which whatever fits stands on one line, so that a changed workload is one changed line."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(flat) <= _WIDTH:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {dumps(item, inner)}" for key, item in value.items()]
    else:
        parts = [dumps(item, inner) for item in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return opening + "\n" + ",\n".join(inner + part for part in parts) + "\n" + indent + closing
