"""Operands that a row leaves out, and that are by default of another kind than its skeleton takes."""

from __future__ import annotations

from msa_tiles.codegen.plan import KernelPlan
from msa_tiles.paths import specs_dir
from msa_tiles.spec import SpecError, load


def misfits(plan: KernelPlan) -> str:
    """Sentences, each with what comes behind it, about operands of a plan that has no table.

    They are of roles that the row names none for, where no shipped row of the same skeleton takes that module. Empty
    where there are none.
    """
    try:
        shipped = load(specs_dir())
    except SpecError:  # whoever reads it says so
        return ""
    if plan.op not in shipped.operators:
        return ""
    kind = (plan.dsl, plan.mma, plan.algorithm)
    rows = [row for row in shipped.operators[plan.op].kernels if (row.dsl, row.mma, row.algorithm) == kind]
    told = ""
    for role, taken in plan.operands.items():
        fitting: dict[str, str] = {}  # the precision of one, by module
        for row in rows:
            stored = shipped.precisions[row.precision].roles.get(role)
            if stored is not None:
                fitting.setdefault(row.operands.get(role, stored.operand), row.precision)
        if role in plan.named or not fitting or taken in fitting:
            continue
        there = ", ".join(f"{role}: {module} ({precision})" for module, precision in fitting.items())
        told += (
            f"the row names no operand for {role}, so that it is {taken}, that of the format, which does not fit "
            f"{plan.skeleton}; shipped rows of this skeleton have operands: {there}; "
        )
    return told
