"""What is installed, and what is said where it does not do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from msa_tiles.runtime import toolchain


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    remembered = (toolchain.tilelang_libraries, toolchain.cutedsl_runtime)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.1.12", False), ("0.1.9.post1", False), ("0.1.14.dev3", False), ("0.1.15", True), ("0.1.15.post2", True),
     ("0.1.16+cu130", True), ("0.2.0", True)],
)  # fmt: skip
def test_an_older_tilelang_than_kernels_are_written_in_is_refused(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_installed", lambda _name: version)
    why = toolchain.missing("tilelang")
    assert (why is None) == fits
    if why is not None:
        assert why.startswith(f"TileLang kernels are written for tilelang 0.1.15, {version} is installed")
        with pytest.raises(toolchain.ToolchainError, match="are written for tilelang"):
            toolchain.require_compiler("tilelang")


def test_a_driver_of_a_series_that_no_runtime_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_driver_series", lambda: 3)
    with pytest.raises(toolchain.ToolchainError, match="runs up to cu3: the installed nvidia-cutlass-dsl has cu"):
        toolchain.cutedsl_runtime()


def test_an_installation_without_its_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_CUTEDSL_RUNTIME", "libnothing.so")
    monkeypatch.setattr(toolchain, "_driver_series", lambda: None)
    with pytest.raises(toolchain.ToolchainError, match=r"has no libnothing\.so; reinstall it") as caught:
        toolchain.cutedsl_runtime()
    assert "None" not in str(caught.value)
