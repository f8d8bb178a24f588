"""Longest predicted first: the order in which groups start.

Owns: order only. Never: who is free, who is stale. Invariant: in this order, and each to whoever has least to do
(``dispatch.least_loaded``), groups end on M equal workers within 4/3 - 1/(3M) of the best there is (Graham 1969).
"""


def longest_first(predicted_tokens: float) -> float:
    """Sort key of a group: the longest predicted response comes first.

    Source: StreamRL sec. 5.3; a long sample that starts late is the tail that everyone waits for.
    """
    return -predicted_tokens
