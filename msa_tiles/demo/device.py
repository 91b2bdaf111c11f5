"""Where the demo runs: a GPU that the kernels serve, else the reference on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from msa_tiles import console, ops
from msa_tiles.demo.embed import M3, SMALL, Layer, Shape
from msa_tiles.demo.precision import BF16, held
from msa_tiles.reference.threads import one_thread

CPU_CHUNK = 1024
"""Queries in one call on a CPU: small enough that progress is seen to move."""


@dataclass(frozen=True)
class Device:
    """A torch device, the dtype and layer shape that suit it, and how many queries one call takes (0: all)."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    shape: Shape
    chunk: int

    def small_steps(self) -> contextlib.AbstractContextManager[None]:
        """For work made of many small products: on a CPU, threads would spend it waiting for each other."""
        return one_thread() if self.torch_device.type == "cpu" else contextlib.nullcontext()

    def synchronise(self) -> None:
        """Wait for the device, so that clocks and progress tell the truth."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


CPU = Device("CPU (reference)", torch.device("cpu"), torch.float32, SMALL, CPU_CHUNK)


def choose(precision: str = BF16) -> Device:
    """The GPU if every operator of the demo runs on it, else the CPU; says which, and why not the GPU.

    Queries of quantised keys are bfloat16, on a CPU too.
    """
    place = CPU if precision == BF16 else dataclasses.replace(CPU, dtype=torch.bfloat16)
    if not torch.cuda.is_available():
        console.say("no CUDA device: running the reference on the CPU")
        return place
    device = Device(torch.cuda.get_device_name(), torch.device("cuda"), torch.bfloat16, M3, 0)
    console.say(f"loading the kernels for {device.name} (compiled the first time, a minute or so)")
    try:
        _rehearse(device, precision)
    except (ValueError, RuntimeError, OSError) as error:
        # An unsupported GPU or a missing compiler should not hide what the demo shows; it is said, never silent.
        console.say(f"this GPU cannot run the demo, so the reference runs on the CPU instead. The reason:\n{error}\n")
        return place
    return device


def _rehearse(device: Device, precision: str) -> None:
    """Run each operator once on random tensors of the demo's shape, stored as a precision has them."""
    shape, tokens = device.shape, 2 * device.shape.block_size

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=device.dtype, device=device.torch_device)

    chosen: list[torch.Tensor] = []
    keys = (tokens, shape.num_kv_heads, shape.head_dim)
    layer = held(
        Layer(
            q=random(tokens, shape.num_q_heads, shape.head_dim),
            k=random(*keys),
            v=random(*keys),
            idx_q=random(tokens, shape.num_index_heads, shape.head_dim),
            idx_k=random(tokens, shape.head_dim),
            words=random(0),
        ),
        precision,
    )

    def select() -> None:
        chosen.append(
            ops.select_blocks(
                layer.idx_q, layer.idx_k, shape.topk, num_kv_heads=shape.num_kv_heads, block_size=shape.block_size
            )
        )

    def attend() -> None:
        ops.sparse_attention(layer.q, layer.k, layer.v, chosen[0], block_size=shape.block_size)

    steps: list[Callable[[], None]] = [select, attend]
    for step in console.progress(steps, "kernels loaded", lambda step: step.__name__):
        step()
        device.synchronise()
