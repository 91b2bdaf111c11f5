"""The YAML drives: no key of any spec can change without being refused or changing what is generated."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutations import Mutation, mutations, texts_by_place

from msa_tiles import codegen, paths
from msa_tiles.spec import SpecError, Specs
from msa_tiles.spec.contract import read_operator
from msa_tiles.spec.hardware import read_target
from msa_tiles.spec.inherit import resolved
from msa_tiles.spec.loader import link
from msa_tiles.spec.precisions import read_precisions
from msa_tiles.spec.source import Node, read

FILES = sorted(path.relative_to(paths.specs_dir()).as_posix() for path in paths.specs_dir().rglob("*.yaml"))
ROOTS = {file: read(paths.specs_dir() / file) for file in FILES}
# Operators that the reference alone serves as yet: nothing is generated from them.
WAITING: list[str] = []
PARTS = ("targets", "formats", "precisions", "operators")
DIGEST = re.compile(r"digest: [0-9a-f]{16}")


@pytest.fixture(scope="module")
def specs() -> Specs:
    return load_with(None, {})


MUTATED = [file for file in FILES if Path(file).stem not in WAITING]
FILES_OF_A_RUN, EACH = 5, 1  # of a quick run, and changes of each of them


def changes_of(file: str) -> list[Mutation]:
    return list(mutations(ROOTS[file].yaml, texts_by_place(node.yaml for node in ROOTS.values())))


def check_that_each_is_noticed(file: str, changes: Iterable[Mutation], specs: Specs, unchanged: Any) -> None:
    without_effect, badly_refused = [], []
    unchanged_part = produced(a_part_of(specs))
    for mutation in changes:
        with mutation.applied():
            try:
                changed = load_with(file, vars_of(specs))
                if produced(a_part_of(changed)) != unchanged_part:
                    continue
                result = produced(changed)
            except SpecError as error:
                if not all(re.match(r"\S+:\d+: \S", line) for line in str(error).splitlines()):
                    badly_refused.append(f"{mutation}: {error}")
                continue
        if result == unchanged and not is_another_name(file, mutation, specs):
            without_effect.append(str(mutation))
    assert not badly_refused
    assert not without_effect


def a_part_of(specs: Specs) -> Specs:
    """One kernel of a few operators, in which most changes show that show at all."""
    few = itertools.islice(specs.operators.items(), 3)
    operators = {name: dataclasses.replace(operator, kernels=operator.kernels[:1]) for name, operator in few}
    return dataclasses.replace(specs, operators=operators)


def is_another_name(file: str, mutation: Mutation, specs: Specs) -> bool:
    """Whether a tensor's dtype is called by another field of the precision, of the same dtype in all of the rows'."""
    operator = specs.operators.get(Path(file).stem)
    if operator is None or mutation.trail[0] not in ("inputs", "outputs") or mutation.trail[-1] != "dtype":
        return False
    (tensor,) = (tensor for tensor in operator.tensors if tensor.name == mutation.trail[1])
    other = dataclasses.replace(tensor, dtype=mutation.changed["value"])
    precisions = [specs.precisions[row.precision] for row in operator.kernels]
    return all(tensor.resolve_dtype(precision) == other.resolve_dtype(precision) for precision in precisions)


def half_of(changes: Iterable[Mutation], draw: random.Random) -> list[Mutation]:
    """Half of the changes that there are of each key, value and item, and one where there is no other."""
    places: dict[tuple[str | int, ...], list[Mutation]] = {}
    for mutation in changes:
        places.setdefault(mutation.trail, []).append(mutation)
    return [mutation for found in places.values() for mutation in draw.sample(found, max(len(found) // 2, 1))]


@pytest.mark.parametrize("file", MUTATED)
@pytest.mark.slow
def test_every_key_is_needed_or_changes_what_is_generated(file: str, specs: Specs) -> None:
    """Every key, value and item in every run, in half of the ways: others in the next one."""
    changes, part = changes_of(file), only_what_reads(file, specs)
    assert len(changes) > 40
    drawn = half_of(changes, random.Random(f"{os.environ['MSA_TILES_SEED']} {file}"))
    check_that_each_is_noticed(file, drawn, part, produced(part))


def test_runs_change_every_key_and_between_them_make_every_change() -> None:
    changes = changes_of(MUTATED[0])
    runs = [half_of(changes, random.Random(seed)) for seed in range(30)]
    for run in runs:
        assert {mutation.trail for mutation in run} == {mutation.trail for mutation in changes}
        assert len(run) < 0.6 * len(changes)
    assert {str(mutation) for run in runs for mutation in run} == {str(mutation) for mutation in changes}


def test_some_changes_are_refused_or_change_what_is_generated(specs: Specs) -> None:
    """What the test above does with every key, with one of a few files each: drawn anew in every run."""
    draw = random.Random(int(os.environ["MSA_TILES_SEED"]))
    whole = produced(specs)
    for file in draw.sample(MUTATED, FILES_OF_A_RUN):
        part = only_what_reads(file, specs)
        unchanged = whole if part is specs else produced(part)
        check_that_each_is_noticed(file, draw.sample(changes_of(file), EACH), part, unchanged)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.drawn(1)
def test_unknown_and_duplicate_keys_are_reported_on_their_line(file: str, specs: Specs) -> None:
    root = ROOTS[file]
    part = only_what_reads(file, specs)
    found = [each for each in mutations(root.yaml, {}) if each.what in ("key duplicated", "key renamed")]
    # Of each key the one or the other.
    for mutation in half_of(found, random.Random(f"{os.environ['MSA_TILES_SEED']} keys of {file}")):
        with mutation.applied():
            try:
                load_with(file, vars_of(part))
            except SpecError as error:
                for mistake in error.mistakes:
                    if re.search(rf"duplicate key|unknown key '{mutation.trail[-1]}x'", mistake.sentence):
                        assert (mistake.where.file, mistake.where.line) == (root.where.file, mutation.line), mutation
            else:
                assert mutation.what == "key renamed", mutation


@pytest.mark.parametrize("file", ["operators/scale.yaml", "targets/toy.yaml", "precisions.yaml"])
def test_every_change_beside_a_mistake_is_told_or_serves(file: str, tmp_path: Path) -> None:
    """What has no mistake is rendered, in whatever state the rest is: nothing but SpecError comes out."""
    shutil.copytree(Path(__file__).parents[1] / "codegen" / "data", tmp_path, dirs_exist_ok=True)
    operator, path = tmp_path / "specs" / "operators" / "scale.yaml", tmp_path / "specs" / file
    operator.write_text(operator.read_text().replace("targets: [toy]", "targets: [toy, roy]"))
    root = yaml.compose(path.read_text())
    served = []
    for mutation in mutations(root, texts_by_place([root])):
        with mutation.applied():
            path.write_text(yaml.serialize(root))
        try:
            codegen.checked([tmp_path / "specs"], [tmp_path / "skeletons"])
            served.append(mutation.trail)
        except SpecError as error:
            assert all(re.match(r"\S+:\d+: \S", line) for line in str(error).splitlines()), f"{mutation}: {error}"
    # What mends it: without the row, its targets, or the one that there is not.
    targets = ("kernels", 0, "targets")
    assert served == ([targets[:2], targets, (*targets, 1)] if file == "operators/scale.yaml" else [])


def load_with(file: str | None, known: Mapping[str, Mapping]) -> Specs:
    """The specs as they are in `ROOTS` now; only `file` is read again when the rest is known."""
    parts = {name: dict(known[name]) if name in known else {} for name in PARTS}
    for name in FILES if file is None else [file]:
        stem = Path(name).stem
        if name == "precisions.yaml":
            parts["formats"], parts["precisions"] = read_precisions(ROOTS[name])
        else:
            part = Path(name).parent.name
            roots = resolved([[ROOTS[each] for each in FILES if Path(each).parent.name == part]])
            parts[part][stem] = (read_target if part == "targets" else read_operator)(roots[stem], stem)
    return link(**parts)


def only_what_reads(file: str, specs: Specs) -> Specs:
    """The specs without the operators that cannot notice a change in `file`."""
    if not file.startswith("operators/"):
        return specs
    stem = Path(file).stem
    return link(specs.targets, specs.formats, specs.precisions, {stem: specs.operators[stem]})


def vars_of(specs: Specs) -> dict[str, Mapping]:
    return {part: getattr(specs, part) for part in PARTS}


def produced(specs: Specs) -> tuple[dict[str, str], list]:
    """Everything generated, digests left out: they would differ for any reason."""
    result = codegen.produce(specs)
    cells = [{key: value for key, value in cell.items() if key != "digest"} for cell in result.index["cells"]]
    rest = [(key, value) for key, value in result.index.items() if key != "cells"]
    return {path: DIGEST.sub("", text) for path, text in result.files.items()}, [rest, cells]


def test_every_other_operator_has_a_kernel(specs: Specs) -> None:
    # An operator without one would fail above: nothing is generated from it.
    assert [name for name, operator in specs.operators.items() if not operator.kernels] == WAITING


def test_the_tree_is_left_as_it_was() -> None:
    fresh: Node = read(paths.specs_dir() / FILES[0])
    for mutation in mutations(fresh.yaml, {}):
        before = str(fresh.yaml)
        with mutation.applied():
            assert str(fresh.yaml) != before or mutation.what == "key duplicated"
        assert str(fresh.yaml) == before
