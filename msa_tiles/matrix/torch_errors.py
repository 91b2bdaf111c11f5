"""What torch itself is off by in the precision of a cell: the same computation in bfloat16, on the dequantised inputs.

One drawn case, of 64 queries and 1,024 keys. Both are compared with float64.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from msa_tiles import readable
from msa_tiles.bench.inputs import in_format
from msa_tiles.quant import QuantizedTensor

QUERIES, KEYS, DIM, BLOCK = 64, 1024, 128, 128
SCORES = ("index_score", "decode_score", "select_blocks")
ATTENTION = ("sparse_attention", "shared_attention", "sparse_decode")


@functools.lru_cache(maxsize=64)
def torch_error(op: str, precision: str) -> float | None:
    """The largest absolute error of torch's scores or outputs; None for operators that compute neither."""
    precisions = readable.specs().precisions
    if precision not in precisions:
        return None  # of a tree whose specs have mistakes
    formats = precisions[precision].roles
    generator = torch.Generator().manual_seed(0)

    def drawn(role: str, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        made = in_format(values, formats[role].name, fitted=True)
        return made.dequantize() if isinstance(made, QuantizedTensor) else made.float()

    if op in SCORES:
        q, k = drawn("query", QUERIES, 1, DIM)[:, 0], drawn("index_key", KEYS, DIM)
        exact = (q.double() @ k.double().T).unflatten(1, (-1, BLOCK)).amax(-1)
        found = (q.bfloat16() @ k.bfloat16().T).unflatten(1, (-1, BLOCK)).amax(-1)
        return float((found.double() - exact).abs().max())
    if op in ATTENTION:
        q = drawn("query", QUERIES, 1, DIM)[:, 0]
        k, v = (drawn("key_value", KEYS, 1, DIM)[:, 0] for _ in "kv")
        weights = (q.double() @ k.double().T * DIM**-0.5).softmax(-1)
        queries, keys, values = (part.bfloat16()[None, None] for part in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)[0, 0]
        return float((found.double() - weights @ v.double()).abs().max())
    return None
