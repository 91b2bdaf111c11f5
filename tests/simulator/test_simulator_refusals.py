"""What the simulator does not know, and arguments that do not fit, are errors that say so."""

from __future__ import annotations

from typing import Any

import pytest
import small_refused
import torch

from msa_tiles.simulator import ArgumentError, UnsupportedError, simulate

X, OUT = torch.arange(96.0).reshape(3, 32), torch.empty(3, 32)


def test_what_fits_runs() -> None:
    out = torch.zeros(3, 32)
    simulate(small_refused.scaled(), X, out, 2.0, 2)
    assert (out[:2] == X[:2] * 2).all() and not out[2].any()
    wide = torch.arange(120.0).reshape(3, 40)
    simulate(small_refused.scaled(), wide[:, 4:36], out, 1.0, 3)
    assert (out == wide[:, 4:36]).all()


def test_nothing_to_do_is_fine() -> None:
    simulate(small_refused.scaled(), torch.empty(0, 32), torch.empty(0, 32), 1.0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, OUT, 2.0), "3 arguments came, wanted 4"),
        ((X.double(), OUT, 2.0, 3), "x: torch.float64 of rank 2 came, wanted float32 of rank 2"),
        ((X[0], OUT, 2.0, 3), "x: torch.float32 of rank 1 came"),
        ((X, OUT[:2], 2.0, 3), "out: n is 2"),
        ((X[:, :31], OUT, 2.0, 3), "x: 32 is 31"),
        ((X, torch.empty(32, 3).T, 2.0, 3), "out: 32 is 1 in a tensor"),
        ((X, OUT, OUT, 3), "factor: Tensor came, wanted a number"),
        ((X, OUT, 2.0, 2**31), "count: 2147483648 does not fit int32"),
        ((X, 1, 2.0, 3), "out: wanted a CPU tensor"),
        ((X.to("meta"), OUT, 2.0, 3), "x: wanted a CPU tensor"),
    ],
)
def test_arguments_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        simulate(small_refused.scaled(), *arguments)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("multiplied", ((64, 64), (64, 64)), "tl.tileop.gemm"),
        ("pipelined", ((4, 64, 64), (4, 64, 64)), "num_stages"),
        ("accumulated", ((64, 64), (64, 64)), "cumsum"),
        ("printed", ((32,),), "is not simulated"),
        ("voted", ((32,),), "vote of a part of a warp"),
        ("hinted", ((32,),), "with pragma_unknown is not simulated"),
        ("narrow", ((32,),), "float8_e5m2 is not simulated"),
    ],
)
def test_an_unknown_construct_is_an_error(name: str, shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    function = getattr(small_refused, name)()
    dtypes = [function.buffer_map[parameter].dtype for parameter in function.params]
    tensors = [torch.zeros(s, dtype=getattr(torch, str(d))) for s, d in zip(shapes, dtypes, strict=True)]
    with pytest.raises(UnsupportedError, match=message):
        simulate(function, *tensors)


def test_tma_limits() -> None:
    out = torch.zeros(64, 64).bfloat16()
    space = torch.randn(64, 84).bfloat16()
    simulate(small_refused.moved(), space[:, :80][:, 8:72].clone(), out)
    with pytest.raises(UnsupportedError, match="x: TMA wants addresses and strides in positive multiples of 16 bytes"):
        simulate(small_refused.moved(), space[:, 8:72], out)
    with pytest.raises(UnsupportedError, match="x: TMA wants addresses"):
        simulate(small_refused.moved(), torch.randn(64, 80).bfloat16()[:, 1:65], out)
