"""The YAML drives: no key of any spec can change without being refused or changing what is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from mutations import mutations, texts_by_place

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


@pytest.mark.parametrize("file", [file for file in FILES if Path(file).stem not in WAITING])
@pytest.mark.drawn(2)
def test_every_change_is_refused_or_changes_what_is_generated(file: str, specs: Specs) -> None:
    root = ROOTS[file]
    part = only_what_reads(file, specs)
    unchanged = produced(part)
    without_effect, badly_refused, count = [], [], 0
    for mutation in mutations(root.yaml, texts_by_place(node.yaml for node in ROOTS.values())):
        count += 1
        with mutation.applied():
            try:
                result = produced(load_with(file, vars_of(part)))
            except SpecError as error:
                if not re.match(r"\S+:\d+: \S", str(error)):
                    badly_refused.append(f"{mutation}: {error}")
                continue
        if result == unchanged:
            without_effect.append(str(mutation))
    assert count > 40
    assert not badly_refused
    assert not without_effect


@pytest.mark.parametrize("file", FILES)
def test_unknown_and_duplicate_keys_are_reported_on_their_line(file: str, specs: Specs) -> None:
    root = ROOTS[file]
    part = only_what_reads(file, specs)
    for mutation in mutations(root.yaml, {}):
        if mutation.what not in ("key duplicated", "key renamed"):
            continue
        with mutation.applied():
            try:
                load_with(file, vars_of(part))
            except SpecError as error:
                if re.search(rf"duplicate key|unknown key '{mutation.trail[-1]}x'", error.sentence):
                    assert (error.where.file, error.where.line) == (root.where.file, mutation.line), mutation
            else:
                assert mutation.what == "key renamed", mutation


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
