"""Where a packed token stands: its request, its position and the last key that it may see."""

import tilelang.language as T


@T.macro
def last_at_most(starts, count, value, found):
    """found[0] = the largest b in [0, count) with starts[b] <= value; starts ascends and starts[0] <= value."""
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    middle = T.alloc_var("int32")
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] <= value:
            low = middle
        else:
            high = middle - 1
    found[0] = low


@T.macro
def last_tile_at_most(starts, count, tile, value, found):
    """The same over starts[b] // tile + b: slots that hold every tile of every request, a few of them unused.

    Request b owns the slots from starts[b] // tile + b up to the next request's first; that is always enough for its
    ceil(length / tile) tiles, so a grid of starts[-1] // tile + count slots needs no prefix sum.
    """
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    middle = T.alloc_var("int32")
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] // tile + middle <= value:
            low = middle
        else:
            high = middle - 1
    found[0] = low


def key_length(cu_seqlens_k, seqused_k, use_seqused, request):
    """Number of keys of a request: seqused_k where the caller gave it, else what cu_seqlens_k says."""
    return T.if_then_else(use_seqused != 0, seqused_k[request], cu_seqlens_k[request + 1] - cu_seqlens_k[request])


def last_visible(q_positions, use_positions, token, first_token, first_limit, length):
    """The last key that a token of a request sees, below 0 for none.

    Without positions the token stands first_limit + token - first_token, first_token being any of its request.
    """
    return T.min(T.if_then_else(use_positions != 0, q_positions[token], first_limit + token - first_token), length - 1)


@T.macro
def tile_limits(q_positions, use_positions, first_token, last_token, first_limit, length, least, most):
    """least[0] and most[0] = the extremes of last_visible over the tokens from first_token to last_token."""
    if use_positions == 0:
        least[0] = T.min(first_limit, length - 1)
        most[0] = T.min(first_limit + last_token - first_token, length - 1)
    else:
        least[0] = length - 1
        most[0] = -1
        for i in T.serial(last_token - first_token + 1):
            least[0] = T.min(least[0], q_positions[first_token + i])
            most[0] = T.max(most[0], T.min(q_positions[first_token + i], length - 1))
