"""From specs to kernel files: plan, render, write. Imports neither torch nor a DSL."""

from msa_tiles.codegen.digest import digest_of
from msa_tiles.codegen.plan import KernelPlan, Selection, illegal, plan_row, plans
from msa_tiles.codegen.writer import Changes, Generated, checked, drift, generate, produce, write

__all__ = [
    "Changes",
    "Generated",
    "KernelPlan",
    "Selection",
    "checked",
    "digest_of",
    "drift",
    "generate",
    "illegal",
    "plan_row",
    "plans",
    "produce",
    "write",
]
