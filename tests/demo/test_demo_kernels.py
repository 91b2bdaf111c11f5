"""The comparison of regenerated kernels with the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_tiles import paths
from msa_tiles.codegen import generate
from msa_tiles.demo.kernels import differences


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


FILES = {"tilelang/sm90/a_bf16.py": "a = 1\n", "tilelang/sm90/b_bf16.py": "b = 1\n", "index.json": "{}\n"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tilelang/sm90/a_bf16.py": "a = 2\n"}, "tilelang/sm90/a_bf16.py differs from what the specs generate"),
        ({"index.json": "[]\n"}, "index.json differs from what the specs generate"),
        ({"tilelang/sm90/c_bf16.py": ""}, "tilelang/sm90/c_bf16.py is shipped but does not follow from the specs"),
    ],
)
def test_each_difference_is_told(tmp_path, change, sentence):
    shipped = _write(tmp_path, FILES | change)
    assert differences(shipped, lambda folder: _write(folder, FILES)) == (2, [sentence])


def test_a_kernel_that_is_not_shipped_is_told(tmp_path):
    shipped = _write(tmp_path, {name: FILES[name] for name in list(FILES)[1:]})
    sentence = "tilelang/sm90/a_bf16.py follows from the specs but is not shipped"
    assert differences(shipped, lambda folder: _write(folder, FILES)) == (2, [sentence])


def test_evidence_and_caches_are_no_difference(tmp_path):
    shipped = _write(tmp_path, FILES | {"verified.json": "{}", "tilelang/sm90/__pycache__/a_bf16.cpython-311.py": ""})
    assert differences(shipped, lambda folder: _write(folder, FILES)) == (2, [])


@pytest.mark.slow  # codegen/test_generated.py does the same without the demo
def test_the_shipped_kernels_follow_from_the_shipped_specs():
    _, found = differences(paths.generated_dir(), lambda folder: generate(paths.specs_dir(), folder))
    assert found == []
