"""What a server does first, as a program: `python serving.py DEVICE NAME…` runs these steps and prints what they took.

With BLOCK_DSLS in the environment a DSL cannot be imported. The output is a JSON object: `seconds` from importing us to
each step's result, `inputs` until there was something to work on, `compiled` kernels, and `slow`, what was imported of
what takes long: modules of a DSL, and torch._dynamo.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

DSLS = ("tilelang", "tvm", "cutlass", "nvidia_cutlass_dsl")
STEPS = ("select", "attention", "decode", "training")


def steps(device: str) -> dict[str, Callable[[], Any]]:
    """Small calls of the M3 shape."""
    import torch

    from msa_tiles import ops

    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    tokens, blocks = (1024, 16) if device != "cpu" else (160, 2)
    q, k, v = normal(tokens, 64, 128), normal(tokens, 4, 128), normal(tokens, 4, 128)
    idx_q, idx_k = normal(tokens, 4, 128), normal(tokens, 128)
    pages = [tensor.view(-1, 32, *tensor.shape[1:]).movedim(1, -2).contiguous() for tensor in (k, v)]
    table = torch.arange(tokens // 32, dtype=torch.int32, device=device)[None]
    used = torch.tensor([tokens - 3], dtype=torch.int32, device=device)

    def training() -> torch.Tensor:
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v, idx_q, idx_k)]
        out, loss = ops.msa_attention(*inputs, blocks, return_kl=True)
        (out.float().sum() + loss).backward()
        return inputs[0].grad

    def decode() -> torch.Tensor:
        where = {"page_table": table, "seqused_k": used, "max_seqlen_k": tokens}
        return ops.msa_decode(q[:1], *pages, idx_q[:1], idx_k.view(-1, 32, 128), blocks, **where)

    ids = ops.select_blocks(idx_q.float(), idx_k.float(), blocks, backend="reference")
    return {
        "select": lambda: ops.select_blocks(idx_q, idx_k, blocks),
        "attention": lambda: ops.sparse_attention(q, k, v, ids),
        "decode": decode,
        "training": training,
    }


def main(device: str, *names: str) -> None:
    """Raises what a step raises, and AssertionError where a result is not finite."""
    before = set(sys.modules)  # an interpreter that has a DSL's packages may begin with some of it
    if "BLOCK_DSLS" in os.environ:
        sys.modules.update(dict.fromkeys(DSLS))  # as if they were not installed
    import torch

    torch.zeros(1, device=device).cpu()
    started = time.monotonic()
    from msa_tiles.runtime import compile_count

    found = steps(device)
    begun = time.monotonic()
    seconds = {}
    for name in names:
        result = found[name]()
        assert bool(result.float().isfinite().all()), name
        seconds[name] = time.monotonic() - started
    modules = {name for name, module in sys.modules.items() if module is not None} - before
    imported = sorted({name.split(".")[0] for name in modules} & set(DSLS))
    imported += ["torch._dynamo"] * ("torch._dynamo" in modules)
    report = {"seconds": seconds, "inputs": begun - started, "compiled": compile_count(), "slow": imported}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
