"""Which kernels a pack holds: cells and variants of the M3 shape for serving and for training, or those of a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msa_tiles.names import check
from msa_tiles.runtime import evidence, tuned
from msa_tiles.runtime.build import Job
from msa_tiles.runtime.registry import Cell, Registry
from msa_tiles.spec.model import DSLS

# The shape of MiniMax-M3: one index head for every KV head's group, keys flat or in pages of a block. Dims that are not
# named here take every value that kernels have.
M3 = {"head_dim": (128,), "index_dim": (128,), "block_size": (128,), "pages_per_block": (0, 1)}
_FORWARD = ("build_schedule", "combine", "index_score", "select_blocks", "split_selection", "topk_select")
_ATTENTION = ("shared_attention", "sparse_attention")
OPERATORS = {
    "serving": (
        *("append_index", "append_kv", "dequantize_kv", "norm_rope_append", *_FORWARD, *_ATTENTION),
        *("decode_score", "decode_topk", "sparse_decode"),
    ),
    "training": (
        *_FORWARD, *_ATTENTION, "gradient_rows", "index_gradients", "index_kl", "index_lse", "merge_gradients",
        "sparse_attention_backward",
    ),
}  # fmt: skip
# A model is trained on flat keys of 16 bits.
_TRAINING = {"pages_per_block": (0,)}
SETS = (*OPERATORS, "all")
UNVERIFIED = "unverified"  # what `msa-tiles verify --stale` launches: see msa_tiles.verify.launched
BEST, BOTH = "best", "both"


def jobs_of(points: str, registry: Registry, target: str, dsl: str) -> list[Job]:
    """The kernels of `serving`, `training`, `all` or a file, for a target.

    ``dsl`` is a DSL, `both`, or `best`: those DSLs that some committed figure has in front for the operator, in the
    precision or else in another one, and what else its calls need that these do not serve. A file is JSON: a list
    of objects with `op` and, as far as they are to be narrowed down, `precision`, `dsl` and `variant`, an object of a
    value or a list of them for each dim.

    Raises ValueError for a file that is not like that, and for points that no kernel has.
    """
    found = _of_set(points, registry, target) if points in SETS else _of_file(Path(points), registry, target)
    asked = list(found)
    if not asked:
        raise ValueError(f"--points {points}: no kernel for {target} has such points")
    jobs: dict[tuple[str, tuple[tuple[str, int], ...]], Job] = {}
    for cell, variant in asked:
        if cell.dsl in _wanted(cell, variant, asked, registry, dsl):
            jobs[cell.id, tuple(variant.items())] = Job(cell, variant)
    return sorted(jobs.values(), key=str)


def _of_set(points: str, registry: Registry, target: str) -> Iterator[tuple[Cell, dict[str, int]]]:
    for name, operators in OPERATORS.items():
        if points not in (name, "all"):
            continue
        for cell in registry.select(target=target):
            if cell.op not in operators or (name == "training" and registry.group_of(cell.precision) != "bf16"):
                continue
            narrowed = {**M3, **(_TRAINING if name == "training" else {})}
            yield from ((cell, variant) for variant in variants_of(cell, narrowed))


def variants_of(cell: Cell, narrowed: Mapping[str, Iterable[int]]) -> Iterator[dict[str, int]]:
    """The variants of a cell whose dims have one of the values that are asked for, in the spec's order."""
    choices = [
        [value for value in values if name not in narrowed or value in narrowed[name]]
        for name, values in cell.variants.items()
    ]
    for values in itertools.product(*choices):
        yield dict(zip(cell.variants, values, strict=True))


def _of_file(path: Path, registry: Registry, target: str) -> Iterator[tuple[Cell, dict[str, int]]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        sets = ", ".join((*SETS, UNVERIFIED))
        raise ValueError(f"--points {path} is none of {sets}, and no file ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, list):
        raise ValueError(f"{path} holds {type(document).__name__}, wanted a list of objects with `op`")
    for i, entry in enumerate(document):
        if not isinstance(entry, dict) or not {"op"} <= entry.keys() <= {"op", "precision", "dsl", "variant"}:
            raise ValueError(f"{path}: entry {i} is {entry!r}, wanted an object of op, precision, dsl and variant")
        known = {
            "op": [cell.op for cell in registry.cells],
            "precision": [*registry.precisions, *(format["group"] for format in registry.formats.values())],
            "dsl": DSLS,
        }
        for name in known.keys() & entry.keys():
            check(f"{path}: entry {i}: {name}", [entry[name]], known[name])
        cells = registry.select(entry["op"], entry.get("dsl"), target, entry.get("precision"))
        narrowed = _narrowed(entry.get("variant", {}), f"{path}: entry {i}")
        found = 0
        for cell in cells:
            if unknown := narrowed.keys() - cell.variants.keys():
                raise ValueError(f"{path}: entry {i} names {min(unknown)}, {cell.op} has {', '.join(cell.variants)}")
            for variant in variants_of(cell, narrowed):
                found += 1
                yield cell, variant
        if not found:
            raise ValueError(f"{path}: entry {i}, {entry}: no kernel for {target} has such points")


def _narrowed(variant: object, where: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(variant, dict):
        raise ValueError(f"{where} has variant {variant!r}, wanted an object")
    values = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in variant.items()}
    for name, numbers in values.items():
        if not all(type(number) is int for number in numbers):
            raise ValueError(f"{where} has {name} {variant[name]!r}, wanted a number or a list of them")
    return values


def _wanted(
    cell: Cell, variant: Mapping[str, int], asked: list[tuple[Cell, dict[str, int]]], registry: Registry, dsl: str
) -> set[str]:
    """The DSLs whose kernels of a cell's operator and precision go into the pack."""
    if dsl == BOTH:
        return set(DSLS)
    if dsl != BEST:
        return {dsl}
    rivals = {other.dsl: other for other, dims in asked if _alike(other, cell) and dims == variant}
    ran = {rival.id for rival in rivals.values() if evidence.has_run(rival, registry)}
    best = set()
    for figure in tuned.counting(tuned.figures_of(*registry.directories), rivals.values()):
        ms = tuned.times(figure, rivals.values())
        best.add(min(rivals.values(), key=lambda rival: (rival.id not in ran, *tuned.preference(rival, ms))).dsl)
    # Nothing was measured: whichever serves most calls; the order of DSLs decides among equals.
    best = best or {max(rivals.values(), key=lambda rival: (len(rival.features), -DSLS.index(rival.dsl))).dsl}
    served = frozenset().union(*(rivals[name].features for name in best))
    return best | {name for name, rival in rivals.items() if rival.features - served}


def _alike(one: Cell, other: Cell) -> bool:
    return (one.op, one.precision, one.target) == (other.op, other.precision, other.target)
