"""How far a result may lie from the exact one: from its dtype, its size and the number of terms in it.

The reference computes in float64 where tensors are float64, else in float32, and rounds to a tensor's dtype at the end.
So a sum whose terms' magnitudes add up to `size` is off by at most `size` times

- the unit roundoff of the tensor's dtype, for every rounding to it (`roundings`), and
- `terms` unit roundoffs of the type it computes in, where `terms` counts what is added up, and what the terms
  themselves are off by: a bound for every order of the additions, so that no data and no number of threads breaks it.

Where terms cancel, the result is smaller than `size`, and the error is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def bound(dtype: torch.dtype, terms: float, size: Any = 1.0, roundings: int = 1) -> Any:
    """The largest error; `size` is a number or a tensor of the results' shape, and so is what comes back."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return size * (roundings * unit(dtype) + terms * unit(work))


def softmax_terms(keys: int, dim: int, logit: float) -> float:
    """`terms` of a sum weighted by a softmax over that many keys, of scores that are sums of `dim` products.

    `logit` bounds the sums of the products' magnitudes. A weight exp(s - lse) is off, relatively, by what its exponent
    is off: `dim` + 2 roundings of `logit` in s, as many in the LSE, and two more in a running maximum.
    """
    return keys + 4 * (dim + 4) * max(logit, 1.0)


def close(
    found: Any, wanted: Any, *, terms: float, size: Any = None, roundings: int = 1, dtype: torch.dtype | None = None
) -> None:
    """Tensors, or sequences of them, agree within `bound`; NaN and infinities stand in the same places.

    Without a `size` it is the largest finite value wanted, at least 1: that of inputs of about 1 which do not cancel.
    `dtype` is the one that results were rounded to, where it is not their own.
    """
    if not isinstance(wanted, Tensor):
        assert isinstance(wanted, Sequence) and len(found) == len(wanted)
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            try:
                close(one, other, terms=terms, size=size, roundings=roundings, dtype=dtype)
            except AssertionError as error:
                raise AssertionError(f"tensor {number}: {error}") from None
        return
    assert found.shape == wanted.shape, f"shape {list(found.shape)}, wanted {list(wanted.shape)}"
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    got, want, finite = found.detach().double(), wanted.detach().double(), wanted.isfinite()
    assert torch.equal(got.isnan(), want.isnan()), "NaN in other places"
    assert torch.equal(got[~finite].nan_to_num(nan=0.0), want[~finite].nan_to_num(nan=0.0)), "infinities differ"
    if size is None:
        size = max(float(want[finite].abs().max()), 1.0) if bool(finite.any()) else 1.0
    accepted = torch.as_tensor(bound(dtype or found.dtype, terms, size, roundings), dtype=torch.float64)
    excess = ((got - want).abs() - accepted)[finite]
    assert not bool((excess > 0).any()), f"off by {float(excess.max()):.3g} more than the accepted {accepted.max():.3g}"
