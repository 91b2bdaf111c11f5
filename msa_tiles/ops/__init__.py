"""The public operators. CPU tensors run on `msa_tiles.reference`, CUDA tensors on generated kernels.

Operators over requests take the same keyword arguments that say where things are:

- ``cu_seqlens_q``, ``cu_seqlens_k`` int32 [B + 1]: requests packed one after another. Without them the tensors are one
  sequence. They may end before T and Tk: what lies behind is of no request, such as padding to the size of a captured
  graph. Queries there get out 0, LSE and scores -inf, ids -1 and loss 0 (`index_kl` still divides by T), keys are not
  read, and ``check=True`` accepts both.
- ``page_table`` int32 [B, max_pages] and ``seqused_k`` int32 [B]: paged keys, and how many keys a request has; the
  latter also with flat keys.
- ``max_seqlen_q``, ``max_seqlen_k``: upper bounds known to the host; ``max_seqlen_k`` counts positions, so it includes
  ``k_offset``, and ``page_table`` must have pages for as many.
- ``q_positions`` int32 [T] overrides the rule that query i of a request sits at ``len_k - len_q + i``.
- ``k_offset`` int32 [B]: position of the first key that this call holds. Blocks keep the numbers of the whole request,
  and the position rule then counts from that first key. Kernels need multiples of ``block_size`` (`topk_select` does
  not): queries of other shards get NaN in scores, outputs and LSE, and ids -1; ``check=True`` refuses such a call.
- ``check=True`` reads device contents to the host and checks them; this synchronises.

``softmax_scale`` and ``index_scale`` are above 0 (from 2**-64 to 2**64): another one would turn or lose the order of
the scores, by which rows are computed.

`sparse_attention`, `dense_attention`, `index_kl` and their whole, `msa_attention`, are differentiable, once.

``backend`` is ``auto``, ``tilelang``, ``cutedsl`` or ``reference``. A DSL that is named must have a kernel for the
operator itself; the helpers that the operator launches on its way (a schedule, a merge) are of that DSL where it has
them, and of another elsewhere. ``cutedsl`` needs the extra of that name. Wrong arguments raise ``ValueError`` or
``TypeError``; a CUDA call that no kernel serves raises `msa_tiles.runtime.NoKernelError`, a ``ValueError``.
"""

from msa_tiles.call.schedule import Schedule
from msa_tiles.ops.append_index import append_index
from msa_tiles.ops.append_kv import append_kv
from msa_tiles.ops.build_schedule import build_schedule
from msa_tiles.ops.combine import combine
from msa_tiles.ops.decode_score import decode_score
from msa_tiles.ops.decode_topk import decode_topk
from msa_tiles.ops.dense_attention import dense_attention
from msa_tiles.ops.dequantize_kv import dequantize_kv
from msa_tiles.ops.index_kl import index_kl
from msa_tiles.ops.index_score import index_score
from msa_tiles.ops.msa_attention import msa_attention
from msa_tiles.ops.msa_decode import decode_workspace_bytes, msa_decode
from msa_tiles.ops.norm_rope_append import norm_rope_append
from msa_tiles.ops.select_blocks import select_blocks
from msa_tiles.ops.sparse_attention import sparse_attention
from msa_tiles.ops.sparse_attention_backward import sparse_attention_backward
from msa_tiles.ops.sparse_decode import sparse_decode
from msa_tiles.ops.topk_select import topk_select

__all__ = [
    "Schedule",
    "append_index",
    "append_kv",
    "build_schedule",
    "combine",
    "decode_score",
    "decode_topk",
    "decode_workspace_bytes",
    "dense_attention",
    "dequantize_kv",
    "index_kl",
    "index_score",
    "msa_attention",
    "msa_decode",
    "norm_rope_append",
    "select_blocks",
    "sparse_attention",
    "sparse_attention_backward",
    "sparse_decode",
    "topk_select",
]
