"""The answer to `msa_tiles.explain`, as objects and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msa_tiles.names import counted
from msa_tiles.runtime.accuracy import Accuracy, in_words

# What calls run on besides kernels of ours, as a value and in words.
REFERENCE, BORROWED, NOTHING = "reference", "borrowed", "nothing"
IN_WORDS = {
    REFERENCE: "runs on the reference in plain torch",
    BORROWED: "runs on FlashAttention-4 where it is installed and takes the call, else on torch's attention",
    NOTHING: "runs no kernel: there is nothing to compute",
}
ORIGINS = {"pack": "from the pack {}", "cache": "from the cache", "compile": "compiled on first use"}


@dataclass(frozen=True)
class Expectation:
    """Milliseconds of an operator: `floor_ms` is what the roofline allows on `device`, `ms` what is to be expected.

    `ms` lies between what was measured at the floors next to it, of `rows` rows of the operator, in this precision and
    DSL, on `card`. `within` is the largest factor by which such an expectation misses one of these rows, where that row
    itself is left out; None where no row has another near it. `ms` is None where nothing was measured, or nothing of
    such a size. Then, where `msa-tiles tune` timed this very kernel at this very work, `ms` comes from that
    figure, and `workload` says of what.
    """

    floor_ms: float
    device: str
    ms: float | None = None
    within: float | None = None
    rows: int = 0
    card: str | None = None
    workload: str | None = None

    def __str__(self) -> str:
        floor = f"roofline {_time(self.floor_ms)} on {self.device}"
        if self.ms is None:
            return f"not measured{' at such a size' if self.rows else ''}; {floor}"
        if self.workload is not None:
            return f"about {_time(self.ms)} ({floor}; timed as {self.workload} on {self.card})"
        text = f"about {_time(self.ms)} ({floor}; {counted(self.rows, 'row')} measured on {self.card}"
        return f"{text}, each met within a factor of {self.within:.3g})" if self.within is not None else f"{text})"


@dataclass(frozen=True)
class Asked:
    """One kernel that was asked: what it would run as, or every reason for which it refuses.

    `why_not` says why one that would serve the call does not run; it is None of the one that runs.
    """

    cell: str
    variant: Mapping[str, int]
    refusal: str | None
    why_not: str | None = None


@dataclass(frozen=True)
class Launched:
    """The kernel of one operator in a call. `cell` is None where every kernel refuses.

    `tree` is the tree of one's own that the kernel is of. `origin` says where it comes from: "pack", "cache" or
    "compile", and `place` which pack. `launches` is how often the call launches it, with `grid` thread blocks the first
    time (None where its file does not say so simply). `optional` is a kernel that the call does without where none
    serves it. `errors` are the worst ones of the kernel on record, and `tolerance` is what its spec accepts, by output.
    """

    op: str
    precision: str
    cell: str | None
    tree: str | None
    variant: Mapping[str, int]
    origin: str | None
    place: str | None
    file: str | None
    launches: int
    grid: tuple[int, ...] | None
    asked: tuple[Asked, ...]
    optional: bool = False
    expectation: Expectation | None = None
    notes: tuple[str, ...] = ()
    tolerance: Mapping[str, float] = dataclasses.field(default_factory=dict)
    errors: tuple[Accuracy, ...] = ()

    def lines(self) -> Iterator[str]:
        variant = " ".join(f"{name}={value}" for name, value in self.variant.items())
        if self.cell is None:
            yield f"{self.op}: no kernel serves it" + (", and the call does without" if self.optional else "")
        else:
            whence = "" if self.tree is None else f" (of the tree {self.tree})"
            yield f"{self.cell}{whence}  {variant}".rstrip()
            parts = [ORIGINS[self.origin or "compile"].format(self.place)]
            parts.append(counted(self.launches, "launch", "launches") if self.launches else "found, and not launched")
            if self.grid is not None:
                parts.append(f"grid {' x '.join(f'{size:,}' for size in self.grid)}")
            yield "  " + ", ".join(parts)
            if self.expectation is not None:
                yield f"  {self.expectation}"
            yield f"  {in_words(self.errors, self.tolerance)}"
        yield from (f"  {note}" for note in self.notes)
        for each in self.asked:
            if each.refusal is not None:
                yield f"  {each.cell}: refuses: {each.refusal}"
            elif each.why_not is not None:
                yield f"  {each.cell}: serves it, and does not run: {each.why_not}"


@dataclass(frozen=True)
class Explanation:
    """What a call would do. `str()` of it is for people, `to_dict()` for JSON.

    It is a call of `op` on `device`, a GPU of the family `target`, or with None what has no kernels. `kernels` are
    those that it asks for. `runs` is "kernels"; "reference"; "borrowed" of `dense_attention`, which is another
    library's; or "nothing" where there is nothing to compute. `workspace_bytes` is the most memory that the call holds
    at a time besides its arguments and its results, None of the reference and of what is borrowed, whose memory is not
    known; `result_bytes` is what the results that it allocates take. `expectation` is of the whole call; `notes` say
    what was assumed, and what the figures leave out.
    """

    op: str
    device: str
    target: str | None
    runs: str
    kernels: tuple[Launched, ...]
    workspace_bytes: int | None
    result_bytes: int
    expectation: Expectation | None
    notes: tuple[str, ...]

    @property
    def served(self) -> bool:
        """Whether the call would run: False where it would raise NoKernelError."""
        return all(kernel.cell is not None or kernel.optional for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        return {"served": self.served, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.op} on {self.device}"
        if self.runs in IN_WORDS:
            asked = self.runs == REFERENCE and self.target is not None
            yield f"  {IN_WORDS[self.runs]}{', as backend says' if asked else ''}"
        else:
            launches = sum(kernel.launches for kernel in self.kernels if kernel.cell is not None)
            what = counted(launches, "launch", "launches")
            yield f"  {what}, workspace {_size(self.workspace_bytes or 0)}, results {_size(self.result_bytes)}"
        if self.expectation is not None:
            yield f"  {self.expectation}"
        yield from (f"  {note}" for note in self.notes)
        if not self.served:
            yield "  No kernel serves this call: it would raise NoKernelError."
        for kernel in self.kernels:
            yield ""
            yield from kernel.lines()


def widening(precision: str) -> str:
    """Says that a call's queries are widened for the kernels of a precision."""
    return f"queries are widened to bfloat16, for kernels of {precision}"


def rounded_copy(stored: str) -> str:
    """Says of a call what its attention's errors count from: a copy of keys and values that are stored in a format."""
    return (
        f"Keys and values are copied from {stored} to bfloat16 first, and errors of attention count from that copy. "
        "Where scales are no powers of two, they are rounded into it, which comes on top: the LSE was off by up to "
        "0.008 (NVFP4 with a global scale)."
    )


def _time(ms: float) -> str:
    return f"{1e3 * ms:.3g} us" if ms < 0.1 else f"{ms:.3g} ms"


def _size(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
