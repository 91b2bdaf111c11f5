"""Where a packed token stands: its request, its position and the last key that it may see."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def last_at_most(starts: cute.Tensor, value: Int32) -> Int32:
    """The largest b in [0, size) with starts[b] <= value; starts ascends and starts[0] <= value."""
    low = Int32(0)
    high = Int32(cute.size(starts)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] <= value:
            low = middle
        else:
            high = middle - 1
    return low


@cute.jit
def last_tile_at_most(starts: cute.Tensor, tile: cutlass.Constexpr, value: Int32) -> Int32:
    """The same over starts[b] // tile + b: slots that hold every tile of every request, a few of them unused.

    Request b owns the slots from starts[b] // tile + b up to the next request's first; that is always enough for its
    ceil(length / tile) tiles, so a grid of starts[-1] // tile + size slots needs no prefix sum.
    """
    low = Int32(0)
    high = Int32(cute.size(starts)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] // tile + middle <= value:
            low = middle
        else:
            high = middle - 1
    return low


@cute.jit
def key_length(cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, use_seqused: Int32, request: Int32) -> Int32:
    """Number of keys of a request: seqused_k where the caller gave it, else what cu_seqlens_k says."""
    length = Int32(0)
    if use_seqused != 0:
        length = seqused_k[request]
    else:
        length = cu_seqlens_k[request + 1] - cu_seqlens_k[request]
    return length


@cute.jit
def last_visible(
    q_positions: cute.Tensor, use_positions: Int32, token: Int32, first_token: Int32, first_limit: Int32, length: Int32
) -> Int32:
    """The last key that a token of a request sees, below 0 for none.

    Without positions the token stands first_limit + token - first_token, first_token being any of its request.
    """
    position = first_limit + token - first_token
    if use_positions != 0:
        position = q_positions[token]
    return cutlass.min(position, length - 1)


@cute.jit
def tile_limits(
    q_positions: cute.Tensor,
    use_positions: Int32,
    first_token: Int32,
    last_token: Int32,
    first_limit: Int32,
    length: Int32,
) -> tuple[Int32, Int32]:
    """The extremes of last_visible over the tokens from first_token to last_token; all lanes of a warp must call it."""
    least = cutlass.min(first_limit, length - 1)
    most = cutlass.min(first_limit + last_token - first_token, length - 1)
    if use_positions != 0:
        least = length - 1
        most = Int32(-1)
        token = first_token + cute.arch.lane_idx()
        while token <= last_token:
            position = cutlass.min(q_positions[token], length - 1)
            least = cutlass.min(least, position)
            most = cutlass.max(most, position)
            token = token + cute.arch.WARP_SIZE
        least = Int32(cute.arch.warp_redux_sync(least, "min"))
        most = Int32(cute.arch.warp_redux_sync(most, "max"))
    return least, most
