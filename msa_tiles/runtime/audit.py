"""Read a compiled kernel's machine code and compare it with what its plan promised and its target allows."""

from __future__ import annotations

import collections
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msa_tiles.runtime import toolchain
from msa_tiles.runtime.cache import SOURCES, Entry
from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.spec import Expression
from msa_tiles.tables import Table, table_of

FORMAT = 1
# `/*0040*/  @!P0 HGMMA.64x128x16.F32.BF16 …`: an address, perhaps a predicate, then the opcode with its modifiers.
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)", re.M)
_USAGE = re.compile(r"Function (\S+):\s*\n\s*(REG:.*)")
_RESERVED_SHARED = 1024  # the driver's share, which cuobjdump adds for every function with static shared memory
_REGISTER_UNIT = 256  # registers are handed out to a warp in units of this many
_WARP = 32
_BARRIER = "SYNCS.EXCH.64"  # sets up an mbarrier
# `tl::tmem_allocate((&(S[0])), 256);` in CUDA; `tcgen05.alloc.….b32 [%r6], %r65;` after `mov.b32 %r65, 256;` in PTX.
_ALLOCATIONS = {
    "tilelang": re.compile(r"\btmem_allocate\b.*, *(\w+)\);"),
    "cutedsl": re.compile(r"\btcgen05\.alloc\S*\s+\[.*\],\s*(%?\w+);"),
}


def measure(cubin: Path) -> dict[str, Any]:
    """Registers, stack and shared memory of every function of a cubin, and the count of every SASS opcode.

    Raises ToolchainError when cuobjdump or nvdisasm is missing or fails.
    """
    usage = _run("cuobjdump", "--dump-resource-usage", str(cubin))
    functions: dict[str, dict[str, int]] = {}
    for name, line in _USAGE.findall(usage):
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
        functions[name] = {
            "registers": numbers["REG"],
            "stack": numbers["STACK"] + numbers["LOCAL"],
            "static_shared_memory": max(0, numbers["SHARED"] - _RESERVED_SHARED),
        }
    if not functions:
        raise toolchain.ToolchainError(f"cuobjdump found no function in {cubin}: {usage.strip()!r}")
    opcodes = collections.Counter(_OPCODE.findall(_run("nvdisasm", "-c", str(cubin))))
    return {"format": FORMAT, "functions": functions, "opcodes": dict(sorted(opcodes.items()))}


def measured(entry: Entry) -> dict[str, Any]:
    """`measure` of a cache entry, kept in the entry after the first time."""
    kept = entry.read_audit()
    if kept is not None and kept.get("format") == FORMAT:
        return kept
    found = measure(entry.cubin)
    entry.write_audit(found)
    return found


def complaints(cell: Cell, variant: Mapping[str, int], target: Target, entry: Entry) -> list[str]:
    """What is wrong with a compiled variant: sentences, none when the audit holds."""
    found = measured(entry)
    return [
        *_resource_complaints(cell, variant, target, entry.meta["kernels"], found["functions"], found["opcodes"]),
        *_tensor_memory_complaints(cell, variant, target, entry),
        *_opcode_complaints(cell.entry["expect"], cell.entry["forbid"], found["opcodes"]),
        *_pipeline_complaints(found["opcodes"]),
    ]


def has_opcode(wanted: str, opcodes: Iterable[str]) -> bool:
    """Whether some opcode is `wanted`: the same base and at least its modifiers (`UTCOMMA.4X`, `HGMMA`)."""
    base, *modifiers = wanted.split(".")
    return any(
        parts[0] == base and set(modifiers) <= set(parts[1:]) for parts in (opcode.split(".") for opcode in opcodes)
    )


def _resource_complaints(
    cell: Cell,
    variant: Mapping[str, int],
    target: Target,
    launches: Mapping[str, Mapping[str, int]],
    functions: Mapping[str, Mapping[str, int]],
    opcodes: Mapping[str, int],
) -> list[str]:
    found = []
    table, (promised_threads, promised_shared, redistributed) = _promises(cell, variant)
    for name, function in functions.items():
        if name not in launches:
            found.append(f"{name} is in the device code but is never launched")
            continue
        threads = launches[name]["threads"]
        shared = function["static_shared_memory"] + launches[name]["dynamic_shared_memory"]
        warps = -(-threads // _WARP)
        allotted = warps * -(-function["registers"] * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        checks = [
            (function["stack"] > 0, f"spills or keeps arrays on a stack of {function['stack']} bytes, wanted none"),
            (threads != promised_threads, f"runs {threads} threads, the plan says {promised_threads}"),
            (
                threads > target.threads_per_block,
                f"runs {threads} threads, {target.name} allows {target.threads_per_block}",
            ),
            (
                function["registers"] > target.registers_per_thread,
                f"uses {function['registers']} registers, {target.name} allows {target.registers_per_thread}",
            ),
            (
                redistributed > allotted,
                f"starts with {allotted} registers, its warps ask for {redistributed} and would wait for ever",
            ),
            (
                allotted > target.registers_per_sm,
                f"needs {allotted} registers for a block, {target.name} has {target.registers_per_sm}",
            ),
            (
                shared > promised_shared or (table is not None and shared < promised_shared),
                f"uses {shared} bytes of shared memory, the plan says {promised_shared}",
            ),
            (
                shared > target.shared_memory_per_block,
                f"uses {shared} bytes of shared memory, {target.name} allows {target.shared_memory_per_block}",
            ),
        ]
        found.extend(f"{name} {sentence}" for wrong, sentence in checks if wrong)
    if table is not None and (made := opcodes.get(_BARRIER, 0)) != len(table.barriers):
        found.append(f"the code makes {made} barriers, the kernel's table has {len(table.barriers)}")
    return found


def _promises(cell: Cell, variant: Mapping[str, int]) -> tuple[Table | None, tuple[int | float, ...]]:
    """Threads, bytes of shared memory and registers that the kernel's table, or its row, says a block takes."""
    table_of_variant = table_of(cell.file.read_text(encoding="utf-8"))
    if table_of_variant is not None:
        table = table_of_variant(**variant)
        return table, (table.threads, table.shared_memory, table.registers)
    names: dict[str, int | float] = {**cell.entry["tile"], **variant}
    names["threads"] = threads = Expression(str(cell.entry["threads"]))(names)
    shared = Expression(str(cell.entry["shared_memory"]))(names)
    return None, (threads, shared, Expression(str(cell.entry["registers"] or 0))(names))


def _tensor_memory_complaints(cell: Cell, variant: Mapping[str, int], target: Target, entry: Entry) -> list[str]:
    """The machine code does not tell how many columns it allocates; the source that the DSL generates does."""
    if not target.tensor_memory_columns:
        return []
    source = (entry.directory / SOURCES[cell.dsl]).read_text()
    table_of_variant = table_of(cell.file.read_text(encoding="utf-8"))
    if table_of_variant is not None:
        promised: int | float = table_of_variant(**variant).tensor_memory
    else:
        promised = Expression(str(cell.entry["tensor_memory"] or 0))({**cell.entry["tile"], **variant})
    amounts = [_constant(amount, source) for amount in _ALLOCATIONS[cell.dsl].findall(source)]
    if None in amounts:
        return ["allocates tensor memory of a size that is known at run time only"]
    columns = sum(amount for amount in amounts if amount)
    checks = [
        (columns != promised, f"takes {columns} columns of tensor memory, the plan says {promised}"),
        (
            columns > target.tensor_memory_columns,
            f"takes {columns} columns of tensor memory, {target.name} allows {target.tensor_memory_columns}",
        ),
    ]
    return [sentence for wrong, sentence in checks if wrong]


def _constant(operand: str, source: str) -> int | None:
    """The value of a literal, or of a PTX register that is set once, to a literal."""
    if operand.isdigit():
        return int(operand)
    values = re.findall(rf"\bmov\.\w+\s+{re.escape(operand)}, (\w+);", source)
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else None


def _opcode_complaints(expect: Iterable[str], forbid: Iterable[str], opcodes: Mapping[str, int]) -> list[str]:
    missing = [f"the plan promised {wanted}, the code has none" for wanted in expect if not has_opcode(wanted, opcodes)]
    unwanted = [f"the code has {banned}, which the plan forbids" for banned in forbid if has_opcode(banned, opcodes)]
    return missing + unwanted


def _pipeline_complaints(opcodes: Mapping[str, int]) -> list[str]:
    """The assembler waits after every wgmma when it cannot follow the accumulators: right, and half as fast."""
    multiplications = sum(count for opcode, count in opcodes.items() if opcode.split(".")[0] in ("HGMMA", "QGMMA"))
    waits = sum(count for opcode, count in opcodes.items() if opcode.startswith("WARPGROUP.DEPBAR"))
    if multiplications and waits >= multiplications:
        return [f"its wgmma are serialised: {waits} waits for {multiplications} multiplications"]
    return []


def _run(tool: str, *arguments: str) -> str:
    command = [str(toolchain.find_disassembler(tool)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise toolchain.ToolchainError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
