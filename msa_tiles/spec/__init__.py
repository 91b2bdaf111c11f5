"""The YAML specs as frozen dataclasses: the only declaration of what exists."""

from msa_tiles.spec.expression import Expression, ExpressionError
from msa_tiles.spec.loader import load
from msa_tiles.spec.mistakes import Location, Mistakes, SpecError
from msa_tiles.spec.model import (
    Device,
    Format,
    KernelRow,
    MmaKind,
    Operator,
    Parameter,
    Point,
    Precision,
    Roofline,
    Scale,
    Specs,
    Target,
    Tensor,
    Variants,
    Workload,
)
from msa_tiles.spec.work import dims_of, floor_ms, quantities_of

__all__ = [
    "Device",
    "Expression",
    "ExpressionError",
    "Format",
    "KernelRow",
    "Location",
    "Mistakes",
    "MmaKind",
    "Operator",
    "Parameter",
    "Point",
    "Precision",
    "Roofline",
    "Scale",
    "SpecError",
    "Specs",
    "Target",
    "Tensor",
    "Variants",
    "Workload",
    "dims_of",
    "floor_ms",
    "load",
    "quantities_of",
]
