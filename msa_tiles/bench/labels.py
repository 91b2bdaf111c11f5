"""Words beside the points of a chart, where they cover nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

_PLACES = (
    ((9, 0), "left", "center"),
    ((-9, 0), "right", "center"),
    ((7, 7), "left", "bottom"),
    ((7, -7), "left", "top"),
    ((-7, 7), "right", "bottom"),
    ((-7, -7), "right", "top"),
    ((0, -9), "center", "top"),
    ((0, 9), "center", "bottom"),
    ((5, -4), "left", "top"),
    ((14, -3), "left", "top"),
    *(((x, -y), side, "top") for y in (22, 36, 50, 64) for x, side in ((0, "center"), (-12, "right"), (12, "left"))),
)
"""Where words may stand beside their point, best first: offset, and the sides of the words that are turned to it."""


def place(figure: Any, axis: Any, words: str, at: tuple[float, float], taken: list[Any], **style: Any) -> None:
    """Write beside a point, in the first place that is inside the axes and not `taken`; the place is taken then."""
    renderer = figure.canvas.get_renderer()
    inside = axis.get_window_extent(renderer)
    others = [tuple(map(float, box.extents)) for box in taken]
    for spot in _PLACES:
        offset, side, edge = spot
        text = axis.annotate(words, at, xytext=offset, textcoords="offset points", ha=side, va=edge, **style)
        box = text.get_window_extent(renderer)
        fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0
        # As Bbox.overlaps has it, of boxes that no axis turns round.
        x0, y0, x1, y1 = map(float, box.extents)
        covers = (x0 <= right and left <= x1 and y0 <= top and bottom <= y1 for left, bottom, right, top in others)
        if (fits and not any(covers)) or spot is _PLACES[-1]:
            taken.append(box)
            return
        text.remove()


def boxes_along(axis: Any, points: Sequence[tuple[float, float]]) -> list[Any]:
    """What a line through these points covers, in pixels: a box around each point, small ones between them."""
    from matplotlib.transforms import Bbox

    corners = [tuple(corner) for corner in axis.transData.transform(points)]
    boxes = [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in corners]
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        steps = max(1, round(math.hypot(x1 - x0, y1 - y0) / 8))
        for step in range(1, steps):
            x, y = x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps
            boxes.append(Bbox.from_bounds(x - 2, y - 2, 4, 4))
    return boxes
