"""What a running block has made and thrown away, so that no plan can save it: an autotuner's products, say.

Whatever a block makes is held while it is watched, since the plan comes when it has returned. What nobody else holds by
then, no reader read, and no backward asks for, is not in the graph that is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from policylang.backends.eager.observation.origins import HeldResult, TensorOrigin, leaves_in, tensors_in
from policylang.torch_compat.eager import storage_address, storage_users
from policylang.torch_compat.tracing import take_apart


def thrown_away(
    entries: Mapping[int, HeldResult],
    spans: Sequence[tuple[int, int]],
    reads: Sequence[Any],
    needed: Collection[int],
) -> list[int]:
    """The operators, of those with ``entries``, that nobody can read any more. Linear in operations and what they read.

    Args:
        spans: by operator, its operations: the first, and the first of the next.
        reads: by operation its arguments, tensors as their origins.
        needed: operations that are needed in any case.
    """
    parts = {at: take_apart(list(tensors_in(each.value)))[0] for at, each in entries.items()}
    ours = Counter(storage_address(part) for own in parts.values() for part in own)
    live = bytearray(len(reads))
    for call in needed:
        live[call] = True
    for at, own in parts.items():
        if any(_is_held_elsewhere(part, ours) for part in own):
            for call in range(*spans[at]):
                live[call] = True
    for call in range(len(reads) - 1, -1, -1):
        if live[call]:
            for origin in leaves_in(reads[call], TensorOrigin):
                if origin.call >= 0:
                    live[origin.call] = True
    return [at for at, own in parts.items() if own and not any(live[call] for call in range(*spans[at]))]


def _is_held_elsewhere(part: Tensor, ours: Mapping[int | None, int]) -> bool:
    at = storage_address(part)
    return at is None or storage_users(part) > ours[at]
