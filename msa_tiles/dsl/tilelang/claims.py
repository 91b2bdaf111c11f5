"""Tasks of a window, claimed one after the other through one atomic counter by whatever CTA is ready for more.

Claims run through one head's list after the other, so that only the queries of one head group have to stay in L2.
"""

import tilelang.language as T


@T.macro
def next_claim(claims, counts, window_index, num_kv_heads, one_list, claim: T.Ref, head: T.Ref):
    """claim = the next task's place among those of its head, or -1 if there are no more. One thread calls it.

    claims [windows] int32 counts what was claimed, counts [windows, lists] int32 has the tasks of each list: one for
    every head, or with one_list = 1 one for all of them, which each goes through.
    """
    seeking = T.alloc_var("int32")
    claim = T.atomic_add(claims[window_index], 1, return_prev=True)
    head = 0
    seeking = 1
    while seeking > 0:
        if head >= num_kv_heads:
            claim = -1
            head = 0
            seeking = 0
        elif claim >= counts[window_index, head * (1 - one_list)]:
            claim = claim - counts[window_index, head * (1 - one_list)]
            head = head + 1
        else:
            seeking = 0


@T.macro
def claim_together(
    thread, claims, counts, window_index, num_kv_heads, one_list, claim_shared, turn: T.Ref, barrier,
    claim: T.Ref, head: T.Ref,
):  # fmt: skip
    """The next task for the 128 threads that meet at the named barrier, found by their thread 0: see next_claim.

    claim_shared [2, 2] takes it from thread to thread, in turns, so that no second meeting is needed.
    """
    if thread == 0:
        next_claim(claims, counts, window_index, num_kv_heads, one_list, claim, head)
        claim_shared[turn & 1, 0] = claim
        claim_shared[turn & 1, 1] = head
    T.sync_threads(barrier, 128)
    claim = claim_shared[turn & 1, 0]
    head = claim_shared[turn & 1, 1]
