"""Packs are found, checked before anything of them is loaded, and refused with a sentence."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi  # noqa: F401, loaded before tests take its loader away

import msa_tiles
from msa_tiles import cli, paths
from msa_tiles.pack import embedded, make, points
from msa_tiles.pack.elf import ElfError, Library
from msa_tiles.pack.embedded import EmbeddedError
from msa_tiles.pack.make import PackingError
from msa_tiles.runtime import dispatch, packed, packs, toolchain
from msa_tiles.runtime.facts import CallFacts, target_facts
from msa_tiles.runtime.packs import PackError
from msa_tiles.runtime.registry import Cell, default_registry
from msa_tiles.sources import helpers_of, texts_of

VARIANT = {"head_dim": 128}
KERNEL = "combine.cutedsl.sm90.bf16-1.so"
CUDA = torch.device("cuda", 0)
PARTIAL = torch.empty(2, 8, 4, 128, dtype=torch.bfloat16, device="meta"), torch.empty(2, 8, 4, device="meta")


@pytest.fixture
def cell() -> Cell:
    [found] = default_registry().select(op="combine", dsl="cutedsl", target="sm90")
    return found


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack is known before a test, and none of this one's afterwards."""
    monkeypatch.delenv(packs.VARIABLE, raising=False)
    monkeypatch.setattr(packs, "_named", [])
    monkeypatch.setattr(packs, "_judged", {})
    monkeypatch.setattr(dispatch, "_kernels", {})
    monkeypatch.setattr(dispatch, "_served", {})
    packs._listed.cache_clear()


@pytest.fixture
def write(cell: Cell, tmp_path: Path) -> Callable[..., Path]:
    """Write a pack of one kernel. Its libraries are no code: whatever loads them fails."""

    def pack(
        name: str = "pack", record: dict[str, Any] | None = None, made: dict[str, Any] | None = None, **changes: Any
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        files = {"runtime.so": b"a runtime", KERNEL: b"a kernel"}
        for file, content in files.items():
            (directory / file).write_bytes(content)
        kernel = {
            "cell": cell.id, "variant": VARIANT, "file": KERNEL, "function": "combine_128", **(record or {})
        }  # fmt: skip
        texts = texts_of(cell.file, helpers_of(cell.file.read_text()))
        code = {"digest": cell.digest, "source": cell.source_hash(), "texts": texts, **(made or {})}
        manifest = {
            "format": 1, "target": "sm90", "arch": "sm_90a", "machine": platform.machine(), "cpu": "x86-64",
            "glibc": "2.17", "tvm_ffi": ["0.1.11", "0.1.13"], "cells": {cell.id: code}, "kernels": [kernel],
            "sha256": {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}, **changes,
        }  # fmt: skip
        (directory / "manifest.json").write_text(json.dumps(manifest))
        return directory

    return pack


def decide(cell: Cell, variant: dict[str, int] = VARIANT, backend: str = "auto") -> dispatch.Decision:
    registry = default_registry()
    call = CallFacts(cell.op, CUDA, "bf16", variant)
    return dispatch.decide(call, target_facts(registry.targets["sm90"]), registry, backend)


def test_a_packed_kernel_goes_before_one_that_is_compiled(
    write: Callable, cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide(cell).chosen.cell.dsl == "tilelang"  # type: ignore[union-attr]
    directory = write()
    pack = msa_tiles.use_pack(directory)
    chosen = decide(cell).chosen
    assert chosen is not None
    assert chosen.cell.id == cell.id
    assert chosen.packed == pack.kernels[cell.id, tuple(VARIANT.items())]
    assert decide(cell, backend="tilelang").chosen.packed is None  # type: ignore[union-attr]
    assert cli.main(["explain", "combine", "--device", "sm90"]) == 0
    text = capsys.readouterr().out
    assert f"{cell.id}: serves it as head_dim=128, from the pack {directory}" in text
    assert f"Runs {cell.id}," in text
    assert cli.main(["explain", "combine", "--device", "sm90", "--variant", "head_dim=64"]) == 0
    assert "from the pack" not in capsys.readouterr().out


def test_it_needs_no_dsl(write: Callable, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda dsl: f"{dsl} is not installed")
    assert decide(cell).chosen is None
    packs.use(write())
    assert decide(cell).chosen.cell.id == cell.id  # type: ignore[union-attr]
    assert "cutedsl is not installed" in decide(cell, {"head_dim": 64}).complaint()


def test_the_variable_lists_packs_the_first_one_first(
    write: Callable, cell: Cell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = write("first"), write("second")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(packs.VARIABLE, f"~/first:{second}")
    assert [pack.directory for pack in packs.active()][:2] == [first, second]
    packs.use(second)
    assert packs.find(cell, VARIANT).pack.directory == second  # type: ignore[union-attr]
    monkeypatch.setenv(packs.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(PackError, match=r"nowhere is no pack: manifest\.json cannot be read"):
        decide(cell)


ELSEWHERE = "s390x" if platform.machine() == "x86_64" else "x86_64"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"machine": ELSEWHERE}, f"is for {ELSEWHERE}, this machine is"),
        ({"tvm_ffi": ["0.1.0", "0.1.5"]}, r"needs apache-tvm-ffi>=0\.1\.0,<0\.1\.5, installed is .* interface differs"),
        ({"tvm_ffi": ["7.0", "8.0"]}, r"needs apache-tvm-ffi>=7\.0,<8\.0"),
        ({"format": 2}, "has not format 1"),
        ({"kernels": {}}, "lists no kernels, cells or hashes: the pack is damaged"),
        ({"sha256": {}}, "lists no kernels, cells or hashes"),
        ({"sha256": {"runtime.so": "1", "../kernel.so": "2"}}, r"names a file '\.\./kernel\.so'"),
        ({"sha256": {"runtime.so": "1", "/lib/libc.so": "2"}}, "names a file '/lib/libc.so'"),
        ({"cells": []}, "lists no kernels, cells or hashes"),
        ({"cells": {}}, "of an unknown cell, or without a hash"),
        ({"made": {"texts": ["x"]}}, "does not say of which code combine.* is"),
        ({"made": {"digest": None}}, "does not say of which code combine.* is"),
        ({"sha256": {"runtime.so": "1"}}, "of an unknown cell, or without a hash"),
        ({"arch": 90}, "does not say arch, machine, cpu and tvm_ffi"),
        ({"tvm_ffi": "0.1.12"}, "does not say arch"),
        ({"record": {"function": None}}, "has a kernel without cell, file, function"),
        ({"record": {"file": "other.so"}}, "of an unknown cell, or without a hash"),
        ({"record": {"variant": {"head_dim": "128"}}}, "has a kernel combine.* without variant"),
        ({"record": {"device": {"name": "k", "parameters": "l", "launch": "x", "offset": -1}}}, "does not describe"),
        ({"record": {"device": {"name": "k", "parameters": "q", "launch": "x", "offset": 0}}}, "does not describe"),
        ({"record": {"device": {"name": "k", "parameters": "l", "launch": "xsx", "offset": 0}}}, "does not describe"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused(write: Callable, changes: dict[str, Any], sentence: str) -> None:
    directory = write(**changes)
    with pytest.raises(PackError, match=sentence) as raised:
        packs.use(directory)
    assert str(directory) in str(raised.value)
    assert packs.active() == packs._installed()


@pytest.mark.parametrize(("version", "fits"), [("0.1.11", True), ("0.1.12.post1", True), ("0.1.13.post2", False)])
def test_the_binary_interface_is_that_of_a_range(
    write: Callable, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    directory = write()
    if fits:
        packs.read(directory)
    else:
        with pytest.raises(PackError, match=f"installed is {version}"):
            packs.read(directory)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '"text"', "null"])
def test_a_damaged_manifest_is_refused(write: Callable, text: str) -> None:
    directory = write()
    (directory / "manifest.json").write_text(text)
    with pytest.raises(PackError, match=r"the pack is damaged|has not format 1"):
        packs.read(directory)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["runtime.so", KERNEL])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_library_is_never_loaded(
    write: Callable,
    cell: Cell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    damage: Callable,
) -> None:
    directory = write()
    packs.use(directory)
    damage(directory / file)
    found = packs.find(cell, VARIANT)
    assert found is not None
    loaded = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, **_mode: loaded.append(path))
    monkeypatch.setattr(packed, "_open", [] if file == "runtime.so" else [lambda _description: None])
    monkeypatch.setattr(packed, "_driver", lambda: None)
    complaint = rf"{directory / file} (is not what manifest\.json says|cannot be read).*again"
    with pytest.raises(PackError, match=complaint):
        packed.load(found)
    assert loaded == []
    with pytest.raises(PackError, match=complaint):
        packs.use(directory)
    assert cli.main(["explain", "combine", "--device", "sm90", "--backend", "cutedsl"]) == 2
    assert re.search(complaint, capsys.readouterr().err)
    with pytest.raises(PackError, match=complaint):
        msa_tiles.explain(msa_tiles.ops.combine, *PARTIAL, device="sm90", backend="cutedsl")
    monkeypatch.setenv(packs.VARIABLE, str(directory / "nowhere"))
    with pytest.raises(PackError, match=rf"^{packs.VARIABLE}: \S+nowhere is no pack"):
        packs.active()


def test_the_range_is_that_of_the_dependencies() -> None:
    requirements = importlib.metadata.requires("msa-tiles") or []
    low, high = make.TVM_FFI
    text = next((line for line in requirements if line.startswith(packs.TVM_FFI)), None)
    if text is None:
        pytest.skip("msa-tiles is not installed here")
    assert set(text.removeprefix(packs.TVM_FFI).split(",")) == {f">={low}", f"<{high}"}


def test_without_a_driver_loading_says_so(write: Callable, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    packs.use(write())
    found = packs.find(cell, VARIANT)
    assert found is not None

    def nothing(path: str, **_mode: int) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    monkeypatch.setattr(packed, "_open", [])
    with pytest.raises(PackError, match="a packed kernel needs the CUDA driver: libcuda"):
        packed.load(found)


def test_a_kernel_of_a_tree_that_is_not_in_use_names_it(write: Callable, cell: Cell, tmp_path: Path) -> None:
    tree = tmp_path / "adv"
    own = dataclasses.replace(cell, tree=tree, digest="f" * 16)
    assert make._code_of(own) == {**make._code_of(cell), "digest": own.digest, "tree": "adv"}
    packs.use(write(made={"digest": "0123456789abcdef", "tree": "adv"}))
    [sentence] = packs.mismatches(cell, VARIANT)
    assert sentence.endswith(
        f"this installation's is {cell.digest}: it was made with the tree adv: use that one here (--tree, "
        "MSA_TILES_TREE), or make the pack again"
    )
    [sentence] = packs.mismatches(own, VARIANT)
    assert sentence.endswith(f"that of {tree} is {own.digest}: make the pack again")


def test_a_pack_from_beneath_a_tree_stays_as_it_is(write: Callable, cell: Cell, tmp_path: Path) -> None:
    """Whoever installed it cannot make it again, and need not."""
    own = dataclasses.replace(cell, tree=tmp_path / "adv", digest="f" * 16)
    packs.use(write())
    [sentence] = packs.mismatches(own, VARIANT)
    assert sentence.endswith(f"wants a pack of its own, `msa-tiles pack --tree {own.tree}`")


def test_another_version_of_a_kernel_is_passed_over(
    write: Callable, cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(made={"digest": "0123456789abcdef"})
    packs.use(directory)
    sentence = f"the pack {directory} holds {cell.id} of digest 0123456789abcdef, this installation's is {cell.digest}"
    assert packs.find(cell, VARIANT) is None
    assert packs.mismatches(cell, VARIANT) == [f"{sentence}: make the pack again"]
    assert cli.main(["explain", "combine", "--device", "sm90"]) == 0
    assert sentence in capsys.readouterr().out
    monkeypatch.setattr(toolchain, "missing", lambda dsl: f"{dsl} is not installed")
    assert sentence in decide(cell).complaint()


def test_a_kernel_of_another_text_is_passed_over_and_other_words_are_not(write: Callable, cell: Cell) -> None:
    packs.use(write(made={"texts": {"": "1"}}))
    assert packs.find(cell, VARIANT) is not None
    packs.use(write("other", made={"texts": {"": "1"}, "source": "2"}))
    [sentence] = packs.mismatches(cell, VARIANT)
    assert f"of another text than {cell.file}" in sentence
    assert packs.find(cell, VARIANT).pack.directory.name == "pack"  # type: ignore[union-attr]


def test_kernels_of_another_architecture_are_passed_over(write: Callable, cell: Cell) -> None:
    other = packs.use(write(arch="sm_100a", target="sm100"))
    assert packs.find(cell, VARIANT) is None
    assert packs.mismatches(cell, VARIANT) == [f"no pack is for sm_90a: {other.directory} for sm_100a"]
    packs.use(write("fitting"))
    assert packs.find(cell, VARIANT) is not None
    assert packs.mismatches(cell, VARIANT) == []


@pytest.mark.parametrize("place", ["", "manifest.json", KERNEL])
def test_what_everybody_can_write_is_not_loaded(write: Callable, cell: Cell, place: str) -> None:
    directory = write()
    (directory / place).chmod(0o777)
    with pytest.raises(PackError, match=r"may be written to by others .*, and a pack is code"):
        packs.use(directory).checked(KERNEL)
    (directory / place).chmod(0o755)
    assert packs.use(directory).checked(KERNEL) == directory / KERNEL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_not_loaded(write: Callable) -> None:
    directory = write()
    os.chown(directory / "manifest.json", 12345, -1)
    with pytest.raises(PackError, match=r"belongs to user 12345, .*, and a pack is code"):
        packs.use(directory)


def test_a_wheel_outside_a_checkout_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda dsl: f"{dsl} is not installed")
    arguments = ["pack", "--target", "sm90", "--out", str(tmp_path / "p1.whl")]
    assert cli.main(arguments) == 2
    assert "p1.whl is no name that pip reads" in capsys.readouterr().err
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "site-packages/msa_tiles")
    assert cli.main(arguments) == 2
    assert "a wheel is built in a checkout; elsewhere, name a directory" in capsys.readouterr().err


def test_packs_are_for_one_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(PackingError, match="packs are for x86_64, this machine is aarch64"):
        make.refuse_machine()
    assert cli.main(["pack", "--target", "sm90", "--out", "x"]) == 2
    assert "this machine is aarch64" in capsys.readouterr().err


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--target", "sm80"], "--target sm80 is unknown; no target serves a GPU of compute capability 8.0"),
            (["--target", "sm90", "--dsl", "triton"], "--dsl triton is unknown; known: tilelang, cutedsl, both, best"),
            ([], "--target is missing; it is one of sm100, sm103, sm90"),
            (["--target", "sm103"], "are not: msa-tiles generate --tree DIR --target sm103"),
            (["--target", "sm90,sm100"], "--target sm90,sm100: a pack is for one target"),
            (["--target", "sm90", "--dsl", "tilelang", "--dsl", "best"], "--dsl tilelang,best: name one"),
            (["--target", "sm90", "--jobs", "0"], "--jobs is 0, wanted at least 1"),
            (["--target", "sm90", "--points", "nowhere"], "none of serving, training, all, unverified, and no file"),
        ],
    )
    def test_bad_options_are_refused(
        self, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["pack", *arguments, "--out", str(tmp_path / "pack")]) == 2
        assert sentence in capsys.readouterr().err
        assert not (tmp_path / "pack").exists()

    def test_nothing_is_overwritten(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "kept").touch()
        assert cli.main(["pack", "--target", "sm90", "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "exists and is no empty directory" in error and "packing" not in error

    def test_a_dsl_that_is_missing_is_told_before_anything_is_compiled(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reasons: dict[str, str | None] = {"tilelang": "a TileLang kernel needs tilelang", "cutedsl": None}
        monkeypatch.setattr(toolchain, "missing", reasons.get)
        monkeypatch.setattr(make, "make", lambda *_, **__: pytest.fail("it compiles"))
        command = ["pack", "--target", "sm90", "--points", "serving", "--out", str(tmp_path / "pack")]
        instead = "; --dsl cutedsl packs the kernels that calls take without it"
        assert cli.main(command) == 2
        assert capsys.readouterr().err == f"msa-tiles pack: {reasons['tilelang']}{instead}\n"
        with pytest.raises(pytest.fail.Exception, match="it compiles"):
            cli.main([*command, "--dsl", "cutedsl"])
        reasons["cutedsl"] = "a CuTe DSL kernel needs nvidia-cutlass-dsl"
        assert cli.main([*command, "--dsl", "cutedsl"]) == 2
        assert capsys.readouterr().err == f"msa-tiles pack: {reasons['cutedsl']}\n"

    def test_a_wheel_has_the_name_that_pip_reads(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["pack", "--target", "sm90", "--out", str(tmp_path / "kernels.whl")]) == 2
        assert "py3-none-manylinux_2_17_x86_64.whl" in capsys.readouterr().err


class TestPoints:
    def test_the_best_kernels_serve_every_call_of_the_shape(self) -> None:
        """Whatever features a call needs that some kernel of its point serves, a packed one serves them."""
        registry = default_registry()
        jobs = points.jobs_of("all", registry, "sm90", "best")
        chosen: dict[tuple, set[str]] = {}
        for job in jobs:
            chosen.setdefault((job.cell.op, job.cell.precision, tuple(job.variant.items())), set()).add(job.cell.id)
        cells = {cell.id: cell for cell in registry.cells}
        for job in points.jobs_of("all", registry, "sm90", "both"):
            ids = chosen[job.cell.op, job.cell.precision, tuple(job.variant.items())]
            assert any(job.cell.features <= cells[name].features for name in ids), job

    def test_the_fastest_of_every_size_is_among_them(self) -> None:
        from msa_tiles.runtime import tuned

        registry = default_registry()
        packed_cells = {job.cell.id for job in points.jobs_of("all", registry, "sm90", "best")}
        for figure in tuned.figures_of(registry.directory):
            cells = [cell for cell in registry.cells if cell.id in figure.ms]
            # Where a kernel has changed since, nobody knows which is the faster one.
            if figure.target == "sm90" and cells and all(map(figure.fresh, cells)):
                assert min(cells, key=lambda cell: figure.ms[cell.id]).id in packed_cells, figure

    def test_they_are_of_the_m3_shape(self) -> None:
        registry = default_registry()
        jobs = points.jobs_of("all", registry, "sm90", "cutedsl")
        assert {job.variant["group"] for job in jobs if "group" in job.variant} == {1, 2, 4, 8, 16}
        for name, values in points.M3.items():
            assert {job.variant[name] for job in jobs if name in job.variant} == set(values)
        training = points.jobs_of("training", registry, "sm90", "both")
        assert {job.variant.get("pages_per_block", 0) for job in training} == {0}
        assert "sparse_attention_backward" in {job.cell.op for job in training}
        assert "sparse_attention_backward" not in {
            job.cell.op for job in points.jobs_of("serving", registry, "sm90", "both")
        }

    @pytest.mark.parametrize(
        ("document", "sentence"),
        [
            ("{", "is not JSON"),
            ("{}", "holds dict, wanted a list"),
            ('["combine"]', "entry 0 is 'combine', wanted an object"),
            ('[{"precision": "bf16"}]', "wanted an object of op"),
            ('[{"op": "combine", "size": 1}]', "wanted an object of op"),
            ('[{"op": "nothing"}]', "entry 0: op nothing is unknown; known: append_index"),
            ('[{"op": "combine", "variant": {"head_dim": 96}}]', "no kernel for sm90 has such points"),
            ('[{"op": "combine", "variant": {"heads": 1}}]', "names heads, combine has head_dim"),
            ('[{"op": "combine", "variant": {"head_dim": "128"}}]', "wanted a number"),
            ('[{"op": "combine", "variant": 128}]', "wanted an object"),
        ],
    )
    def test_a_file_of_points_is_read_strictly(self, document: str, sentence: str, tmp_path: Path) -> None:
        (tmp_path / "points.json").write_text(document)
        with pytest.raises(ValueError, match=sentence):
            points.jobs_of(str(tmp_path / "points.json"), default_registry(), "sm90", "both")

    def test_a_file_narrows_down(self, tmp_path: Path) -> None:
        document = [{"op": "topk_select", "variant": {"topk": [16, 32]}}, {"op": "combine", "dsl": "cutedsl"}]
        (tmp_path / "points.json").write_text(json.dumps(document))
        jobs = points.jobs_of(str(tmp_path / "points.json"), default_registry(), "sm90", "both")
        assert sorted(str(job) for job in jobs) == [
            "combine.cutedsl.sm90.bf16 head_dim=128", "combine.cutedsl.sm90.bf16 head_dim=64",
            "topk_select.cutedsl.sm90.bf16 topk=16", "topk_select.cutedsl.sm90.bf16 topk=32",
            "topk_select.tilelang.sm90.bf16 topk=16", "topk_select.tilelang.sm90.bf16 topk=32",
        ]  # fmt: skip

    @pytest.mark.parametrize("precision", ["q16k4", "q16k4m8"])
    def test_a_form_that_a_file_names_is_packed_and_no_other(self, precision: str, tmp_path: Path) -> None:
        (tmp_path / "points.json").write_text(json.dumps([{"op": "decode_score", "precision": precision}]))
        for dsl in ("best", "both"):
            jobs = points.jobs_of(str(tmp_path / "points.json"), default_registry(), "sm90", dsl)
            assert {job.cell.precision for job in jobs} == {precision}


def number(*values: int) -> bytes:
    return b"".join(struct.pack("<Q", value) for value in values)


def text(value: bytes) -> bytes:
    return number(len(value)) + value


def blob(
    kind: bytes = b"cuda",
    form: bytes = b"cubin",
    functions: int = 1,
    types: tuple[tuple[int, int, int], ...] = ((3, 64, 1), (0, 32, 1), (30, 64, 1), (2, 32, 1)),
    tags: tuple[bytes, ...] = (b"tirx.use_programtic_dependent_launch", b"blockIdx.x", b"threadIdx.x"),
    code: bytes = b"\x7fELF and so on",
) -> bytes:
    function = text(b"k") * 2 + number(len(types)) + b"".join(struct.pack("<BBH", *each) for each in types)
    function += number(len(tags)) + b"".join(map(text, tags)) + number(0)
    module = text(form) + number(functions) + function + text(code)
    content = number(3, 0, 1, 1) + number(1, 1) + text(b"_lib") + text(kind) + text(module)
    return number(len(content)) + content


class TestEmbedded:
    def test_a_module_is_read(self) -> None:
        before = b"x" * 8
        found = embedded.read(before + blob() + b"behind", 8)
        assert (found.name, found.parameters, found.launch) == ("k", "limf", "pxX")
        start = 8 + found.offset
        assert (before + blob())[start : start + found.size] == b"\x7fELF and so on"

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"kind": b"rocm"}, "embeds a module of kind 'rocm'"),
            ({"form": b"ptx"}, "is stored as 'ptx'"),
            ({"functions": 2}, "has 2 functions"),
            ({"types": ((2, 16, 1),)}, r"a parameter of DLPack type \(2, 16, 1\)"),
            ({"types": ((0, 32, 4),)}, r"a parameter of DLPack type \(0, 32, 4\)"),
            ({"tags": (b"tir.cluster_dim_x",)}, "launched with 'tir.cluster_dim_x', which packs do not know"),
            ({"code": b"//ptx"}, "is no cubin"),
        ],
    )
    def test_what_is_unknown_is_refused(self, changes: dict[str, Any], sentence: str) -> None:
        with pytest.raises(EmbeddedError, match=sentence):
            embedded.read(blob(**changes), 0)

    def test_a_module_that_ends_early_is_refused(self) -> None:
        for end in range(8, len(blob()) - 1, 7):
            with pytest.raises((EmbeddedError, UnicodeDecodeError)):
                embedded.read(blob()[:end], 0)


class TestElf:
    @pytest.fixture
    def library(self, tmp_path: Path) -> Library:
        from libraries import compile_library

        source = tmp_path / "library.c"
        source.write_text(
            "#include <stdlib.h>\nvoid ask_for(void); int inner_ask(void); int ask(void);\n"
            'int serve(void) { ask_for(); return inner_ask() + ask() + abs(atoi(getenv("X"))); }\n'
        )
        compile_library(tmp_path / "library.so", str(source))
        return Library.read(tmp_path / "library.so")

    def test_a_name_that_is_asked_for_becomes_another(self, library: Library) -> None:
        assert library.asked() == {"ask_for", "inner_ask", "ask"}
        assert library.needed() == {"libc.so.6"}
        assert library.libc() >= (2, 2)
        renamed = Library(library.renamed({"ask_for": "MT1_for"}), "renamed")
        assert renamed.asked() == {"MT1_for", "inner_ask", "ask"}
        assert sum(a != b for a, b in zip(renamed.image, library.image, strict=True)) == 3

    def test_names_that_share_their_text_are_refused(self, library: Library) -> None:
        with pytest.raises(ElfError, match="shares the text of 'inner_ask' with another name"):
            library.renamed({"inner_ask": "MT1er_ask"})

    def test_a_longer_name_is_refused(self, library: Library) -> None:
        with pytest.raises(ValueError, match="wanted 7"):
            library.renamed({"ask_for": "ask_for_it"})

    @pytest.mark.parametrize("image", [b"", b"MZ", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(100)])
    def test_what_is_no_library_is_refused(self, image: bytes) -> None:
        with pytest.raises(ElfError):
            Library(image, "no library")
