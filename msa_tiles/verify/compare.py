"""Comparisons that fail with a sentence, and return the worst error by the name of what was compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles.verify.cases import Disagreement

# What an error is: the largest difference from the reference in float32, the same over the scale of the values (per
# token or head, where a precision has scales), or none, since every element must be equal.
ABSOLUTE, OVER_SCALE, EQUAL = "absolute", "absolute / scale", "equal"
# How many times the error that torch makes on the same inputs, where it computes the same in bfloat16.
TIMES, MOST_TIMES = "times torch's", 2.0
ENOUGH = 64  # finite elements: of fewer, torch's rounding may happen to be exact
FLOAT32 = 2.0**-20  # of the largest element: no less than that counts as torch's error


class Error(NamedTuple):
    """The worst error of one output, by which metric, and the largest that was accepted."""

    worst: float
    accepted: float
    metric: str


Errors = dict[str, Error]


def largest(found: Iterable[Errors]) -> Errors:
    """The worst error of each output among these."""
    errors: Errors = {}
    for some in found:
        for name, error in some.items():
            errors[name] = max(errors.get(name, error), error)
    return errors


def numbers(name: str, got: Tensor, wanted: Tensor, tolerance: float, metric: str = ABSOLUTE) -> Errors:
    """Largest absolute error of floating-point values; NaN and the infinities must stand in the same places.

    `metric` says what the caller has divided both by.
    """
    _same_shape(name, got, wanted)
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        different = test(got) != test(wanted)
        if bool(different.any()):
            raise Disagreement(f"{name}: {kind} at {int(different.sum())} other places, first at {_first(different)}")
    if got.numel() == 0:
        return {name: Error(0.0, tolerance, metric)}
    error = torch.where(torch.isfinite(wanted), got.to(wanted.dtype) - wanted, 0.0).abs()
    worst = float(error.max())
    if worst > tolerance:
        where = _first(error == error.max())
        raise Disagreement(f"{name}: error {worst:.3g} at {where}, accepted {tolerance:.3g}")
    return {name: Error(worst, tolerance, metric)}


def beside_torch(name: str, got: Tensor, wanted: Tensor, rounded: Tensor) -> Errors:
    """The worst error among finite elements, counted in the worst of torch's: ``rounded`` is what that makes of them.

    Nothing is said of few elements. Raises Disagreement for more than MOST_TIMES.
    """
    of_torch = error_of(rounded, wanted)
    return {} if of_torch is None else times_torch(name, _largest(got, wanted), of_torch)


def error_of(rounded: Tensor, wanted: Tensor) -> float | None:
    """The worst error of what torch makes in bfloat16; None for few elements."""
    finite = torch.isfinite(wanted)
    if int(finite.sum()) < ENOUGH:
        return None
    return max(_largest(rounded, wanted), FLOAT32 * float(torch.where(finite, wanted, 0.0).abs().max()))


def _largest(got: Tensor, wanted: Tensor) -> float:
    return float(torch.where(torch.isfinite(wanted), got.to(wanted.dtype) - wanted, 0.0).abs().max())


def times_torch(name: str, worst: float, of_torch: float) -> Errors:
    """An error, counted in torch's on the same inputs. Raises Disagreement for more than MOST_TIMES."""
    if worst > MOST_TIMES * of_torch:
        accepted = f"{MOST_TIMES * of_torch:.3g}, {MOST_TIMES:g} times that of the same in bfloat16"
        raise Disagreement(f"{name}: error {worst:.3g}, accepted {accepted}")
    return {f"{name}, beside torch": Error(worst / of_torch if worst else 0.0, MOST_TIMES, TIMES)}


def same(name: str, got: Tensor, wanted: Tensor) -> Errors:
    """Every element equal."""
    _same_shape(name, got, wanted)
    different = got != wanted
    if bool(different.any()):
        where = _first(different)
        values = f"{got[where].item()} instead of {wanted[where].item()}"
        raise Disagreement(f"{name}: {int(different.sum())} elements differ, first at {where}: {values}")
    return {name: Error(0.0, 0.0, EQUAL)}


def same_bits(name: str, got: Tensor, wanted: Tensor) -> None:
    """Bitwise equal, NaN included."""
    _same_shape(name, got, wanted)
    different = _bits(got) != _bits(wanted)
    if bool(different.any()):
        raise Disagreement(f"{name}: {int(different.sum())} elements differ between runs, first at {_first(different)}")


def selections(
    name: str,
    got: Tensor,
    wanted: Tensor,
    scores: Tensor,
    forced: Tensor,
    order: str,
    tolerance: float,
    metric: str = ABSOLUTE,
) -> Errors:
    """Block ids int32 [H, T, k] that agree with `wanted` but where scores are closer than `tolerance`.

    `scores` [H, T, NB] are the reference's, `forced` [T, NB] says which blocks are in whatever their score.
    """
    _same_shape(name, got, wanted)
    num_blocks = scores.shape[-1]
    if bool(((got < -1) | (got >= num_blocks)).any()):
        raise Disagreement(f"{name}: ids outside [-1, {num_blocks})")
    counts = (got >= 0).sum(-1)
    same(f"{name}: number of ids in a row", counts, (wanted >= 0).sum(-1))
    slots = torch.arange(got.shape[-1], device=got.device)
    if bool(((got >= 0) != (slots < counts[..., None])).any()):
        raise Disagreement(f"{name}: -1 stands before an id")
    ascending = got.sort(-1).values
    if bool(((ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)).any()):
        raise Disagreement(f"{name}: a row has an id twice")
    if order == "ascending" and bool(((got[..., 1:] < got[..., :-1]) & (got[..., 1:] >= 0)).any()):
        raise Disagreement(f"{name}: ids do not ascend")
    mine, reference = (_scores_of(ids, scores, forced) for ids in (got, wanted))
    if order == "ascending":
        mine, reference = mine.sort(-1).values, reference.sort(-1).values
    return numbers(f"{name}: scores of the chosen blocks", mine, reference, tolerance, metric)


def _scores_of(ids: Tensor, scores: Tensor, forced: Tensor) -> Tensor:
    """The scores of chosen blocks, +inf for forced ones, -inf for padding; NaN ranks below every number."""
    if scores.shape[-1] == 0:
        return torch.full(ids.shape, -torch.inf, device=ids.device)
    at = ids.clamp_min(0).to(torch.int64)
    found = scores.gather(-1, at).nan_to_num(nan=torch.finfo(scores.dtype).min, neginf=torch.finfo(scores.dtype).min)
    found = found.masked_fill(forced.expand(scores.shape).gather(-1, at), torch.inf)
    return found.masked_fill(ids < 0, -torch.inf)


def _same_shape(name: str, got: Tensor, wanted: Tensor) -> None:
    if got.shape != wanted.shape:
        raise Disagreement(f"{name}: shape {list(got.shape)}, wanted {list(wanted.shape)}")


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
