"""Global memory as TileLang kernels see it: 64-bit strides, grids that hold every call, what TMA is told."""

from __future__ import annotations

from typing import Any

import pytest
import tilelang
import tilelang.language as T
from tilelang import tvm

from msa_tiles.runtime.compiler import PASS_CONFIGS
from msa_tiles.runtime.registry import Cell, default_registry

CELLS = [cell for cell in default_registry().cells if cell.dsl == "tilelang"]
# What a call has few of: these may lie along the second and third axis of a grid.
BOUNDED = {"num_q_heads", "num_kv_heads", "num_index_heads", "splits", "windows"}
LONGEST = 65_535


def variants(cell: Cell) -> list[dict[str, int]]:
    """One for every layout of the arguments."""
    found = {(variant.get("pages_per_block"), variant.get("token_scales")): variant for variant in cell.ci}
    return list(found.values())


def strides_of(buffer: Any) -> list[Any]:
    """Those that the caller's tensor decides; others follow from extents."""
    extents = list(buffer.shape)
    return [
        stride
        for stride in buffer.strides
        if type(stride).__name__ == "Var" and not any(stride.same_as(extent) for extent in extents)
    ]


def names_in(expression: Any) -> set[str]:
    found: set[str] = set()

    def visit(node: Any) -> None:
        if type(node).__name__ == "Var":
            found.add(str(node.name))

    tvm.tirx.stmt_functor.post_order_visit(expression, visit)
    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
@pytest.mark.drawn(1)
def test_strides_have_64_bits_and_long_axes_come_first(cell: Cell) -> None:
    for variant in variants(cell):
        function = cell.function(**variant)
        for buffer in function.buffer_map.values():
            for stride in strides_of(buffer):
                assert str(stride.dtype) == "int64", f"{buffer.name}: {stride}"
        bounds = tvm.arith.Analyzer()

        def visit(node: Any, bounds: Any = bounds) -> None:
            if type(node).__name__ == "For" and node.thread_binding is not None:
                axis = str(node.thread_binding.thread_tag)
                if axis in ("blockIdx.y", "blockIdx.z") and not names_in(node.extent) <= BOUNDED:
                    assert bounds.const_int_bound(node.extent).max_value <= LONGEST, f"{axis}: {node.extent}"

        tvm.tirx.stmt_functor.post_order_visit(function.body, visit)


@pytest.mark.parametrize("op", ["combine", "gradient_rows"])
@pytest.mark.drawn(1)
def test_the_host_code_cuts_no_stride(op: str) -> None:
    """What lowering makes of them: read as 64 bits, handed to the kernel as 64 bits."""
    (cell,) = (cell for cell in CELLS if cell.op == op and cell.target == "sm90")
    function = cell.function(**cell.ci[0])
    strides = {str(stride.name) for buffer in function.buffer_map.values() for stride in strides_of(buffer)}
    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tvm.transform.PassContext(opt_level=3, config=dict(cell.pass_configs or PASS_CONFIGS)), cuda:
        artifact = tilelang.lower(function, target=cuda, enable_host_codegen=True, enable_device_compile=False)
    host = artifact.rt_mod.inspect_source()
    assert strides
    for name in strides:
        assert f"int64_t {name} = " in host and f"int32_t {name} = " not in host
        assert f"int64_t {name}" in artifact.kernel_source and f"int {name}" not in artifact.kernel_source


def test_what_decides_about_an_axis() -> None:
    size = T.dynamic("size")
    bounds = tvm.arith.Analyzer()
    assert bounds.const_int_bound(size).max_value > LONGEST
    assert bounds.const_int_bound(T.min(size, 4)).max_value == 4
    assert names_in(size * 2 + 1) == {"size"}
