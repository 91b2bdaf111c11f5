"""The check of dequantize_kv: bit for bit over random elements and scales, and nothing where no key is."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.call import caches as calls
from msa_tiles.call.caches import Whole
from msa_tiles.quant import FP8, QuantizedTensor
from msa_tiles.verify import compare
from msa_tiles.verify.caches import PackedCaches, bits, wild_caches, wild_packed
from msa_tiles.verify.cases import Case, Disagreement
from msa_tiles.verify.inputs import TOKEN_MAJOR, Buffer, Source

INT32 = torch.iinfo(torch.int32)


class DequantizeKV:
    """Keys and values against the reference; rows behind a request's last key keep what their buffer held."""

    names = ("k_out", "v_out")

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.backend = case.dims, backend
        self.strided, paged, heads = strided, bool(dims["paged"]), dims["num_kv_heads"]
        lengths = source.lengths(case.workload.sequences, shortened=strided)
        page = dims["page_size"]
        requests, columns = len(case.workload.sequences), -(-lengths.longest_k // page) + 1
        pages = requests * columns + 3 if paged else 1
        held = {"num_pages": pages, "page_size": page if paged else dims["total_k"], "head_dim": dims["head_dim"]}
        self.options: dict[str, Any] = {}
        if paged:
            table = wild_table(source, requests, columns, pages, strided)
            starts = lengths.cu_seqlens_k
            used = starts.diff() if lengths.seqused_k is None else lengths.seqused_k
            self.options = {"page_table": table, "seqused_k": used.to(torch.int32).contiguous()}
        self.tensors: list[Any] = []
        if case.packed:
            packed = wild_packed(source, 2, held, heads, case.packed, strided and paged)
            self.tensors = [made if paged else of_flat(made) for made in packed.made]
        else:
            by_token = bool(dims["token_scales"])
            found = wild_caches(source, 2, held, heads, FP8, strided, by_token)
            assert not isinstance(found, PackedCaches)
            # One of both may have a scale for every head where the other has one for every token.
            given = list(found.scales) or [source.scales((heads, 2))[:, 0], source.scales(())]
            if by_token and strided:
                given[1] = source.scales((heads,))
            for name, view, scale in zip(("k_scale", "v_scale"), found.views, given, strict=True):
                self.tensors.append(view if paged else view[0].transpose(0, 1))
                self.options[name] = scale[0].transpose(0, 1) if scale.dim() == 3 and not paged else scale

    @property
    def whole(self) -> Whole:
        """The call, checked."""
        k, v = self.tensors
        given = (self.options.get(name) for name in ("page_table", "seqused_k", "k_scale", "v_scale"))
        table, used, k_scale, v_scale = given
        return calls.dequantize_kv(
            k, v, page_table=table, seqused_k=used, k_scale=k_scale, v_scale=v_scale, backend=self.backend
        )

    @property
    def used(self) -> Tensor:
        """Which rows are written, [rows, 1, 1]."""
        call = self.whole
        rows, device = call.shape[0], call.device
        if call.page_table is None or call.seqused_k is None:
            return torch.ones(rows, 1, 1, dtype=torch.bool, device=device)
        places = torch.arange(call.page_table.shape[1] * call.k.shape[2], device=device)
        return (places < call.seqused_k[:, None]).view(rows, 1, 1)

    def buffers(self) -> tuple[Buffer, Buffer]:
        """Poisoned ones of a caller, one of them with heads before tokens."""
        shape, device = self.whole.shape, self.whole.device
        return Buffer(shape, torch.bfloat16, device, TOKEN_MAJOR), Buffer(shape, torch.bfloat16, device)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        if not into_buffers:
            return self.written(ops.dequantize_kv(*self.tensors, **self.options, backend=self.backend))
        into = self.buffers()
        views = {name: buffer.view for name, buffer in zip(self.names, into, strict=True)}
        k, v = self.tensors
        ops.dequantize_kv(k, v, **self.options, **views, backend=self.backend)
        return self.taken(into)

    def taken(self, into: tuple[Buffer, Buffer]) -> tuple[Tensor, ...]:
        """What was written into poisoned buffers; raises Disagreement where more was."""
        for name, buffer in zip(self.names, into, strict=True):
            buffer.check_gaps(name)
            behind = ~self.used.expand(buffer.view.shape) & ~buffer.view.isnan()
            if bool(behind.any()):
                raise Disagreement(f"{name}: {int(behind.sum())} elements behind the last keys were overwritten")
        return self.written(tuple(buffer.view for buffer in into))

    def written(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Outputs, with 0 in the rows that nobody writes."""
        return tuple(torch.where(self.used, out, 0.0) for out in outputs)

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        call = self.whole
        wanted = tuple(torch.zeros(call.shape, dtype=torch.bfloat16, device=call.device) for _ in self.names)
        reference.dequantize_kv(
            call.k, call.v, *wanted, page_table=call.page_table, seqused_k=call.seqused_k, k_scale=call.k_scale,
            v_scale=call.v_scale, k_global_scale=call.k_global_scale, v_global_scale=call.v_global_scale,
        )  # fmt: skip
        errors: compare.Errors = {}
        for name, got, expected in zip(self.names, outputs, wanted, strict=True):
            errors |= compare.same(name, bits(got), bits(expected))
        return errors


def wild_table(source: Source, requests: int, columns: int, pages: int, strided: bool) -> Tensor:
    """Distinct pages in random order, int32 [requests, columns], some of which are none of so many."""
    order = torch.rand(pages, generator=source._generator, device=source.device).argsort()[: requests * columns]
    table = order.view(requests, columns)
    for page in (-1, pages, INT32.min, INT32.max):
        table = table.masked_fill(source.chance(0.02, table.shape), page)
    table = table.to(torch.int32)
    return torch.nn.functional.pad(table, (0, 3), value=INT32.max)[:, :columns] if strided else table


def of_flat(made: QuantizedTensor) -> QuantizedTensor:
    """The one page [1, H, Tk, D / 2] as flat keys."""
    data, scale = made.data[0].transpose(0, 1), made.scale.view(torch.uint8)[0].transpose(0, 1)
    return dataclasses.replace(made, data=data, scale=scale.view(made.scale.dtype))


CHECKS = {"dequantize_kv": DequantizeKV}
