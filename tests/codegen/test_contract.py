"""What the opening comment of a generated kernel says of tensors that a precision stores in another shape."""

from __future__ import annotations

import pytest

from msa_tiles.runtime.registry import default_registry


def said(cell: str) -> dict[str, str]:
    """The lines about tensors, by name."""
    [found] = [each for each in default_registry().cells if each.id == cell]
    comment = found.file.read_text(encoding="utf-8").partition('"""')[0]
    lines = [line.removeprefix("#").split(maxsplit=1) for line in comment.splitlines() if "  [" in line]
    return {name: " ".join(rest.split()) for name, rest in lines}


@pytest.mark.parametrize(
    ("cell", "tensor", "start"),
    [
        ("decode_score.cutedsl.sm90.q16k4", "idx_k", "[total_k, head_dim / 2] uint8"),
        ("decode_score.cutedsl.sm90.q16k4", "k_scale", "[total_k, head_dim / 16] float8_e4m3fn"),
        ("sparse_decode.tilelang.sm90.q16kvmx4", "v", "[total_k, num_kv_heads, head_dim / 2] uint8"),
        ("sparse_decode.tilelang.sm90.q16kvmx4", "v_scale", "[total_k, num_kv_heads, head_dim / 32] float8_e8m0fnu"),
        ("sparse_decode.cutedsl.sm90.q16kv8", "k", "[total_k, num_kv_heads, head_dim] float8_e4m3fn"),
        ("sparse_decode.cutedsl.sm90.q16kv8", "k_scale", "[total_k, num_kv_heads] float32"),
        ("append_index.cutedsl.sm90.q16kmx4", "scale", "[num_pages, page_size, head_dim / 32] float8_e8m0fnu"),
        ("norm_rope_append.cutedsl.sm90.q16kv4", "index_cache", "[num_pages, page_size, head_dim / 2] uint8"),
    ],
)
def test_shapes_are_those_of_the_format(cell: str, tensor: str, start: str) -> None:
    assert said(cell)[tensor].startswith(start)
