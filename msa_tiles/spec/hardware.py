"""Reads `targets/*.yaml`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from msa_tiles.names import meant
from msa_tiles.spec.mistakes import Mistakes
from msa_tiles.spec.model import Device, MmaKind, Target, frozen
from msa_tiles.spec.source import Fields, Node

T = TypeVar("T")
# Letters behind an architecture, and the capability from which on nvcc knows them: instructions of one architecture, or
# of its family.
_LETTERS = {"a": (9, 0), "f": (10, 0)}
_OWN_INSTRUCTIONS = re.compile(r"[A-Z]GMMA(\..*)?|UTC[A-Z]+(\..*)?")  # wgmma and tcgen05, in machine code


def read_target(root: Node, file_stem: str) -> Target:
    """Raises SpecError with every mistake of the file."""
    with Mistakes() as mistakes:
        keys = Fields(
            mistakes,
            root,
            required=(
                *("target", "summary", "arch", "capability", "devices", "default_device", "shared_memory", "registers"),
                *("threads_per_block", "mma", "copy", "forbid"),
            ),
            optional=("inherits", "on_request", "tensor_memory_columns"),
        )
        name = keys.get("target", lambda node: _name(node, file_stem))
        summary = keys.get("summary", Node.string)
        capability = keys.get("capability", _capability)
        arch = keys.get("arch", lambda node: _arch(node, capability))
        threads = keys.get("threads_per_block", lambda node: node.integer(minimum=32))
        mma = keys.get("mma", lambda node: _each(node.named(), lambda kind, value: _mma(kind, value, threads)))
        if arch is not None and mma is not None:
            mistakes.passes(_check_instructions, keys.nodes["arch"], arch, mma)
        elements = None if mma is None else {element for kind in mma.values() for element in kind.elements}
        products = keys.get("devices", Node.entries)
        devices = mistakes.entries(lambda product, node: _device(product, node, elements), products or {})
        default = keys.get("default_device", lambda node: _default(node, products))
        shared = keys.get("shared_memory", lambda node: _memory(node, "per_block"), (0, 0))
        registers = keys.get("registers", lambda node: _memory(node, "per_thread"), (0, 0))
        tensor_memory_columns = keys.get("tensor_memory_columns", lambda node: node.integer(1), 0)
        copy = keys.get("copy", lambda node: _each(node.named(), lambda _, opcodes: read_opcodes(opcodes)))
        forbid = keys.get("forbid", read_opcodes)
        inherits = keys.get("inherits", Node.identifier, "")
        on_request = keys.get("on_request", Node.boolean, False)
    return Target(
        name=name,
        summary=summary,
        arch=arch,
        capability=(capability[0], capability[1]),
        devices=frozen(devices),
        default_device=default,
        shared_memory_per_block=shared[0],
        shared_memory_per_sm=shared[1],
        registers_per_thread=registers[0],
        registers_per_sm=registers[1],
        threads_per_block=threads,
        tensor_memory_columns=tensor_memory_columns,
        mma=frozen(mma),
        copy=frozen(copy),
        forbid=forbid,
        inherits=inherits,
        on_request=on_request,
        where=root.where,
    )


def _each(nodes: Mapping[str, Node], reader: Callable[[str, Node], T]) -> dict[str, T]:
    with Mistakes() as mistakes:
        return mistakes.entries(reader, nodes)


def _name(node: Node, file_stem: str) -> str:
    if (name := node.identifier()) != file_stem:
        raise node.error(f"target is {name!r} in a file named {file_stem}.yaml")
    return name


def _capability(node: Node) -> list[int]:
    with Mistakes() as mistakes:
        capability = mistakes.each(lambda item: item.integer(minimum=0), node.items())
    if len(capability) != 2:
        raise node.error("capability must be [major, minor]")
    return capability


def _arch(node: Node, capability: list[int] | None) -> str:
    arch = node.string()
    if capability is not None:
        number = f"sm_{capability[0]}{capability[1]}"
        known = [number, *(f"{number}{letter}" for letter, since in _LETTERS.items() if tuple(capability) >= since)]
        if arch not in known:
            names = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
            raise node.error(f"arch must be {names} to agree with capability {capability}, not {arch!r}")
    return arch


def _check_instructions(node: Node, arch: str, mma: Mapping[str, MmaKind]) -> None:
    """Refuse an architecture without the letter where a family multiplies with instructions that need it."""
    for kind in mma.values():
        for opcode in (each for opcodes in kind.elements.values() for each in opcodes):
            if _OWN_INSTRUCTIONS.fullmatch(opcode) and arch[-1] not in _LETTERS:
                raise node.error(f"arch is {arch}, for which no {kind.name} ({opcode}) is compiled; write {arch}a")


def _default(node: Node, products: Mapping[str, Node] | None) -> str:
    default = node.string()
    if products is not None and default not in products:
        raise node.error(f"default_device {default!r} is none of the devices {', '.join(products)}")
    return default


def _memory(node: Node, each: str) -> tuple[int, int]:
    """How much there is for `each` (a block, a thread) and in a multiprocessor."""
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, (each, "per_sm"))
        own, per_sm = (keys.get(key, lambda value: value.integer(minimum=1)) for key in (each, "per_sm"))
    if each == "per_block" and own > per_sm:
        raise keys.nodes[each].error(f"{node.name}.{each} {own} exceeds per_sm {per_sm}")
    return own, per_sm


def _device(name: str, node: Node, elements: set[str] | None) -> Device:
    """`elements` are those that the target multiplies; None where they could not be read."""

    def peak(element: str, value: Node) -> float:
        if elements is not None and element not in elements:
            sentence = f"peak_tflops names {element!r}, which no mma kind of the target multiplies"
            raise value.error(sentence + meant(element, elements))
        return value.number(minimum=1)

    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("sm_count", "memory_gb_per_s", "peak_tflops"))
        sm_count = keys.get("sm_count", lambda value: value.integer(minimum=1))
        bandwidth = keys.get("memory_gb_per_s", lambda value: value.number(minimum=1))
        peaks = keys.get("peak_tflops", lambda value: _each(value.entries(), peak))
    return Device(
        name=name,
        sm_count=sm_count,
        memory_gb_per_s=bandwidth,
        peak_tflops=frozen(peaks),
        where=node.where,
    )


def _mma(name: str, node: Node, threads_per_block: int | None) -> MmaKind:
    with Mistakes() as mistakes:
        keys = Fields(mistakes, node, ("thread_group", "elements"), optional=("forbid",))
        group = keys.get("thread_group", lambda value: _thread_group(value, threads_per_block))
        elements = keys.get("elements", _elements)
        forbid = keys.get("forbid", read_opcodes, ())
        for element, opcodes in (elements or {}).items():
            if clash := sorted(set(opcodes) & set(forbid)):
                node = keys.nodes["forbid"]
                mistakes.add(node.error(f"{node.name} forbids {', '.join(clash)}, which {element} needs"))
    return MmaKind(name=name, thread_group=group, elements=frozen(elements), forbid=forbid, where=node.where)


def _thread_group(node: Node, threads_per_block: int | None) -> int:
    group = node.integer(minimum=32)
    if group % 32 or (threads_per_block or group) % group:
        raise node.error(f"thread_group {group} must be whole warps and divide threads_per_block {threads_per_block}")
    return group


def _elements(node: Node) -> dict[str, tuple[str, ...]]:
    elements = _each(node.named(), lambda _, opcodes: read_opcodes(opcodes))
    if not elements:
        raise node.error(f"{node.name} must name at least one element")
    return elements


def read_opcodes(node: Node) -> tuple[str, ...]:
    opcodes = node.strings()
    for opcode in opcodes:
        if not re.fullmatch(r"[A-Z][A-Z0-9]*(\.[A-Z0-9]+)*", opcode):
            raise node.error(f"{node.name}: {opcode!r} is no SASS opcode such as HGMMA or UTCOMMA.4X")
    return opcodes
