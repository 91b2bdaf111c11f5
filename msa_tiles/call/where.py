"""The keyword arguments that say where things are, shared by every operator."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from msa_tiles.call import validate


class Where(NamedTuple):
    """Where the queries and keys of a call stand; None means what the operators' docstrings say.

    Like all that a remembered call makes anew, a NamedTuple: a frozen dataclass takes the host four times as long.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_positions: Tensor | None = None
    k_offset: Tensor | None = None

    @property
    def num_requests(self) -> int:
        return 1 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors among the fields."""
        return (
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.page_table,
            self.seqused_k,
            self.q_positions,
            self.k_offset,
        )

    def keywords(self) -> dict[str, Any]:
        """The fields as the reference takes them."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "page_table": self.page_table,
            "seqused_k": self.seqused_k,
            "q_positions": self.q_positions,
            "k_offset": self.k_offset,
        }

    def flat_keywords(self) -> dict[str, Any]:
        """The same for the functions of the reference that know no pages."""
        return {name: value for name, value in self.keywords().items() if name != "page_table"}

    def without_pages(self) -> Where:
        """The same for an operator that reads no keys."""
        return self._replace(page_table=None)

    def plain(self) -> Where:
        """The same with bounds that are Python's integers."""
        bounds = validate.plain(self.max_seqlen_q), validate.plain(self.max_seqlen_k)
        if bounds == (None, None):
            return self
        return self._replace(max_seqlen_q=bounds[0], max_seqlen_k=bounds[1])

    def validate(self, total_q: int, like: Tensor, like_name: str, keys: Tensor | None) -> None:
        """Check what the host knows. ``keys`` is the call's key tensor, if any."""
        if self.cu_seqlens_q is not None:
            validate.int32("cu_seqlens_q", self.cu_seqlens_q, [None], "[B + 1]", like, like_name)
            if self.cu_seqlens_q.shape[0] == 0:
                validate.refuse("cu_seqlens_q", "shape [0]", "[B + 1], at least one element")
            validate.dense("cu_seqlens_q", self.cu_seqlens_q)
        else:
            self._refuse_requests()
        requests = self.num_requests
        for name, value, shape, dims in (
            ("cu_seqlens_k", self.cu_seqlens_k, [requests + 1], "[B + 1]"),
            ("seqused_k", self.seqused_k, [requests], "[B]"),
            ("k_offset", self.k_offset, [requests], "[B]"),
            ("q_positions", self.q_positions, [total_q], "[T]"),
        ):
            if value is not None:
                validate.int32(name, value, shape, dims, like, like_name)
                validate.dense(name, value)
        for bound_name, bound in (("max_seqlen_q", self.max_seqlen_q), ("max_seqlen_k", self.max_seqlen_k)):
            if bound is not None:
                validate.integer(bound_name, bound, 0)
        if self.page_table is not None:
            self._validate_paged(like, like_name, keys)
        elif keys is not None and self.cu_seqlens_k is None and requests > 1:
            validate.refuse("cu_seqlens_k", "None", f"int32 [B + 1] for the flat keys of {requests} requests")

    def _refuse_requests(self) -> None:
        """Without cu_seqlens_q there is one request: say so where another argument speaks of several."""
        for name, value, further in (
            ("page_table", self.page_table, 0),
            ("seqused_k", self.seqused_k, 0),
            ("cu_seqlens_k", self.cu_seqlens_k, 1),
            ("k_offset", self.k_offset, 0),
        ):
            if isinstance(value, Tensor) and value.dim() and value.shape[0] - further > 1:
                came = f"None beside {name} of {value.shape[0] - further} requests"
                validate.refuse("cu_seqlens_q", came, "int32 [B + 1], where the queries of each request begin")

    def _validate_paged(self, like: Tensor, like_name: str, keys: Tensor | None) -> None:
        table = validate.int32(
            "page_table", self.page_table, [self.num_requests, None], "[B, max_pages]", like, like_name
        )
        validate.unit_last_stride("page_table", table)
        if self.seqused_k is None:
            validate.refuse("seqused_k", "None", "int32 [B] with page_table")
        if self.cu_seqlens_k is not None:
            validate.refuse("cu_seqlens_k", "a tensor beside page_table", "None: seqused_k tells paged lengths")
        # With k_offset the bound counts the keys in front of the shard too.
        if keys is not None and self.max_seqlen_k is not None and self.k_offset is None:
            held = table.shape[1] * keys.shape[-2]
            if held < self.max_seqlen_k:
                validate.refuse(
                    "page_table",
                    f"{table.shape[1]} pages of {keys.shape[-2]} tokens",
                    f"pages for max_seqlen_k = {self.max_seqlen_k} tokens",
                )


def page_size(name: str, keys: Tensor, block_size: int) -> None:
    """Pages must divide a block, so that no page belongs to two blocks."""
    page = keys.shape[-2]
    if page == 0 or block_size % page != 0:
        validate.refuse(name, f"pages of {page} tokens", f"a page size that divides block_size = {block_size}")
