"""Reads `targets/*.yaml`."""

from __future__ import annotations

import re

from msa_tiles.spec.model import Device, MmaKind, Target, frozen
from msa_tiles.spec.source import Node


def read_target(root: Node, file_stem: str) -> Target:
    keys = root.fields(
        required=(
            *("target", "summary", "arch", "capability", "devices", "default_device", "shared_memory", "registers"),
            *("threads_per_block", "mma", "copy", "forbid"),
        ),
        optional=("inherits", "on_request", "tensor_memory_columns"),
    )
    if (name := keys["target"].identifier()) != file_stem:
        raise keys["target"].error(f"target is {name!r} in a file named {file_stem}.yaml")
    capability = [item.integer(minimum=0) for item in keys["capability"].items()]
    if len(capability) != 2:
        raise keys["capability"].error("capability must be [major, minor]")
    expected = f"sm_{capability[0]}{capability[1]}"
    if keys["arch"].string() not in (expected, expected + "a", expected + "f"):
        raise keys["arch"].error(f"arch must be {expected} or {expected}a to agree with capability {capability}")
    threads = keys["threads_per_block"].integer(minimum=32)
    mma = {kind: _mma(kind, node, threads) for kind, node in keys["mma"].named().items()}
    elements = {element for kind in mma.values() for element in kind.elements}
    devices = {product: _device(product, node, elements) for product, node in keys["devices"].entries().items()}
    if (default := keys["default_device"].string()) not in devices:
        raise keys["default_device"].error(f"default_device {default!r} is none of the devices {', '.join(devices)}")
    shared = keys["shared_memory"].fields(("per_block", "per_sm"))
    registers = keys["registers"].fields(("per_thread", "per_sm"))
    per_block, per_sm = shared["per_block"].integer(minimum=1), shared["per_sm"].integer(minimum=1)
    if per_block > per_sm:
        raise shared["per_block"].error(f"shared_memory.per_block {per_block} exceeds per_sm {per_sm}")
    return Target(
        name=name,
        summary=keys["summary"].string(),
        arch=keys["arch"].string(),
        capability=(capability[0], capability[1]),
        devices=frozen(devices),
        default_device=default,
        shared_memory_per_block=per_block,
        shared_memory_per_sm=per_sm,
        registers_per_thread=registers["per_thread"].integer(minimum=1),
        registers_per_sm=registers["per_sm"].integer(minimum=1),
        threads_per_block=threads,
        tensor_memory_columns=keys["tensor_memory_columns"].integer(1) if "tensor_memory_columns" in keys else 0,
        mma=frozen(mma),
        copy=frozen({engine: read_opcodes(node) for engine, node in keys["copy"].named().items()}),
        forbid=read_opcodes(keys["forbid"]),
        inherits=keys["inherits"].identifier() if "inherits" in keys else "",
        on_request=keys["on_request"].boolean() if "on_request" in keys else False,
        where=root.where,
    )


def _device(name: str, node: Node, elements: set[str]) -> Device:
    keys = node.fields(("sm_count", "memory_gb_per_s", "peak_tflops"))
    peaks = {}
    for element, value in keys["peak_tflops"].entries().items():
        if element not in elements:
            raise value.error(f"peak_tflops names {element!r}, which no mma kind of the target multiplies")
        peaks[element] = value.number(minimum=1)
    return Device(
        name=name,
        sm_count=keys["sm_count"].integer(minimum=1),
        memory_gb_per_s=keys["memory_gb_per_s"].number(minimum=1),
        peak_tflops=frozen(peaks),
        where=node.where,
    )


def _mma(name: str, node: Node, threads_per_block: int) -> MmaKind:
    keys = node.fields(("thread_group", "elements"), optional=("forbid",))
    group = keys["thread_group"].integer(minimum=32)
    if group % 32 or threads_per_block % group:
        raise keys["thread_group"].error(
            f"thread_group {group} must be whole warps and divide threads_per_block {threads_per_block}"
        )
    elements = {element: read_opcodes(opcodes) for element, opcodes in keys["elements"].named().items()}
    if not elements:
        raise keys["elements"].error(f"{keys['elements'].name} must name at least one element")
    forbid = read_opcodes(keys["forbid"]) if "forbid" in keys else ()
    for element, opcodes in elements.items():
        if clash := sorted(set(opcodes) & set(forbid)):
            raise keys["forbid"].error(f"{keys['forbid'].name} forbids {', '.join(clash)}, which {element} needs")
    return MmaKind(name=name, thread_group=group, elements=frozen(elements), forbid=forbid, where=node.where)


def read_opcodes(node: Node) -> tuple[str, ...]:
    opcodes = node.strings()
    for opcode in opcodes:
        if not re.fullmatch(r"[A-Z][A-Z0-9]*(\.[A-Z0-9]+)*", opcode):
            raise node.error(f"{node.name}: {opcode!r} is no SASS opcode such as HGMMA or UTCOMMA.4X")
    return opcodes
