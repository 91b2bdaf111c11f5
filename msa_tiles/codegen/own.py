"""What the tree on top of those in use declares, beyond the trees beneath it and the installation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msa_tiles import paths, trees
from msa_tiles.codegen.digest import recorded_digests
from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.codegen.index import INDEX, REQUESTED, joined
from msa_tiles.codegen.misplaced import misplaced
from msa_tiles.codegen.writer import Generated, checked, produce
from msa_tiles.files import from_json
from msa_tiles.spec import KernelRow, Mistakes, SpecError, Specs, Target, load
from msa_tiles.spec.loader import OPERATORS
from msa_tiles.spec.model import frozen


def specs_in_use(stack: Sequence[trees.Tree] | None = None) -> Specs:
    """The shipped specs, with what the trees in use, or these, extend or replace. Raises SpecError."""
    return load(*trees.specs_dirs(stack))


def checked_specs(requested: Collection[str] = ()) -> Specs:
    """The same. The mistakes are told with those that rendering the others finds, and with what nothing would read."""
    top, folders = trees.stack()[0], [*(tree.skeletons for tree in trees.stack()), SKELETONS]
    operators = {file.stem for folder in trees.specs_dirs() for file in (folder / OPERATORS).glob("*.yaml")}
    with Mistakes() as mistakes:
        specs = mistakes.read(checked, trees.specs_dirs(), folders, top.directory, requested)
        for error in misplaced(top, specs, operators):
            mistakes.add(error)
    return cast(Specs, specs)  # or what was found has been raised


def produce_own(specs: Specs, requested: Collection[str] = (), stack: Sequence[trees.Tree] | None = None) -> Generated:
    """Render the cells of the tree on top of those in use, or of a `stack`: those that are new or other than beneath.

    Targets that are generated on request count where they are `requested`, now or when the tree was generated last. Of
    others those cells count whose row is the tree's own and names the target.

    Raises SpecError, also for rows of the tree that no target can run, and ValueError where an index beneath is
    malformed or there is no tree. The tree's own is to be written anew, whatever is there.
    """
    top, *others = trees.stack() if stack is None else stack
    folders = (*(tree.skeletons for tree in (top, *others)), SKELETONS)
    on_request = [name for name, target in specs.targets.items() if target.on_request]
    wanted = sorted({*requested, *_requested(top)} & set(on_request))

    def counts(row: KernelRow) -> bool:
        named = not row.derived and _is_own(row, top)
        return named or row.target not in on_request or row.target in wanted

    counting = _only(specs, counts)
    made = produce(counting, folders, tree=top.directory, requested=on_request, beneath=_beneath(others))
    _refuse_unfit(counting, made, top)
    more = {REQUESTED: wanted, trees.STATE: trees.state_of_sources(top)}
    return dataclasses.replace(made, index={**made.index, **more})


def _is_own(row: KernelRow, tree: trees.Tree) -> bool:
    return Path(row.where.file).resolve().is_relative_to(tree.specs)


def _refuse_unfit(specs: Specs, made: Generated, tree: trees.Tree) -> None:
    """Raises SpecError for rows of a tree of which there is no kernel in some precision: each target is too small."""
    cells: dict[tuple[Any, ...], list[str]] = {}
    for op, operator in specs.operators.items():
        for row in operator.kernels:
            if _is_own(row, tree):
                cells.setdefault((row.where, op, row.dsl, row.precision, row.algorithm), []).append(f"{op}.{row.cell}")
    with Mistakes() as mistakes:
        for (where, *_), of_row in cells.items():
            if all(cell in made.unfit for cell in of_row):
                for cell in of_row:
                    mistakes.add(SpecError(where, made.unfit[cell]))


def produce_for(specs: Specs, target: str) -> Generated:
    """Render all cells of a target, as the trees in use have them, to see which there can be."""
    folders = (*(tree.skeletons for tree in trees.stack()), SKELETONS)
    return produce(_only(specs, lambda row: row.target == target), folders, requested=(target,))


def no_longer_served(generated: Generated, stack: Sequence[trees.Tree]) -> dict[str, str]:
    """What cells of the tree on top of a `stack` do not serve and those beneath, whose place they take, did: by cell.

    Features first, then values of compile-time dims. Cells that serve all of it are left out.
    """
    beneath = {cell["id"]: cell for cell in _beneath(stack[1:])["cells"]}
    lost = {cell["id"]: _lost(cell, beneath[cell["id"]]) for cell in generated.index["cells"] if cell["id"] in beneath}
    return {name: "; ".join(parts) for name, parts in lost.items() if parts}


def _lost(cell: Mapping[str, Any], beneath: Mapping[str, Any]) -> list[str]:
    features = ", ".join(name for name in beneath["features"] if name not in cell["features"])
    parts = [features] if features else []
    for dim, values in beneath["variants"].items():
        own = cell["variants"].get(dim, values)
        # What a dim only has to hold, a larger one holds, too.
        served = range(max(own) + 1) if dim in cell["capacity"] else own
        if missing := [str(value) for value in values if value not in served]:
            parts.append(f"{dim} {', '.join(missing)}")
    return parts


def changed_targets(specs: Specs, generated: Generated, stack: Sequence[trees.Tree]) -> dict[str, bool]:
    """The targets that lie beneath a tree and of which it says otherwise, and whether that changes their limits."""
    beneath = specs_in_use(stack[1:]).targets

    def limits(target: Target) -> tuple[int, ...]:
        return (
            target.shared_memory_per_block,
            target.registers_per_thread,
            target.registers_per_sm,
            target.threads_per_block,
            target.tensor_memory_columns,
        )

    both = (name for name in generated.index["targets"] if name in beneath)
    return {name: limits(specs.targets[name]) != limits(beneath[name]) for name in both}


def _beneath(others: Sequence[trees.Tree]) -> dict[str, Any]:
    """The index of what is shipped, with those of trees, the top one first. Raises ValueError for one malformed."""
    return joined([paths.generated_dir(), *(tree.generated for tree in reversed(others) if is_generated(tree))])


def says_of(tree: trees.Tree, cell: str, generated: Generated) -> bool:
    """Whether a tree itself says anything of a cell: of its target or its operator, or how it is loaded."""
    op, dsl, target, precision = cell.split(".")[:4]
    skeletons = (tree.skeletons / dsl).glob(f"*/{op}*.py")
    return (
        target in generated.index["targets"]
        or precision in generated.index["precisions"]
        or (tree.specs / OPERATORS / f"{op}.yaml").is_file()
        or any(skeletons)
        or any((tree.operands / dsl).glob("*.py"))
    )


def _only(specs: Specs, counts: Callable[[KernelRow], bool]) -> Specs:
    """The specs with the rows that count."""
    kernels = {name: tuple(filter(counts, operator.kernels)) for name, operator in specs.operators.items()}
    operators = {name: dataclasses.replace(each, kernels=kernels[name]) for name, each in specs.operators.items()}
    return dataclasses.replace(specs, operators=frozen(operators))


def _requested(tree: trees.Tree) -> set[str]:
    """The targets that were requested of a tree, by its index; those that it has kernels of where that does not say."""
    try:
        cells = joined([tree.generated])["cells"]
        said = from_json((tree.generated / INDEX).read_text(encoding="utf-8")).get(REQUESTED)
        return {cell["target"] for cell in cells} if said is None else set(said)
    except (ValueError, KeyError, TypeError):
        texts = (file.read_text(encoding="utf-8", errors="replace") for file in tree.generated.rglob("*.py"))
        return {cell.split(".")[2] for text in texts for cell in recorded_digests(text) if cell.count(".") > 2}


def is_generated(tree: trees.Tree) -> bool:
    """Whether a tree has an index of kernels, of which there may be none."""
    return (tree.generated / INDEX).is_file()
