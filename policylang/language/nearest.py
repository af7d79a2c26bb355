"""Did you mean: the known words that a misspelt one is likely to stand for.

Not difflib's ``get_close_matches``: by its ratio the nearest to ``mn`` is ``min`` and not ``mm``, and ``rms_norm`` is
close to ``layer_norm``. Edits name what was meant and little else.
"""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 80
_SHORTEST_PART = 6


def nearest(word: str, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The known words closest to ``word``, best first; empty where none is close.

    A word that differs in capitals alone is the one that was meant. Close are words that hold the misspelt one as a
    part, the shortest first (``flash_attention`` for its full name), and words at most one edit (a character more,
    less, other, or two swapped) in three characters away.
    """
    wanted = word.lower()
    if not wanted or len(wanted) > _LONGEST:
        return ()
    known = tuple(dict.fromkeys(known))
    if same := [candidate for candidate in known if candidate.lower() == wanted]:
        return tuple(same[:limit])
    bound = max(1, len(wanted) // 3)
    edited: list[tuple[int, int, bool, str]] = []
    holding: list[tuple[int, str]] = []
    for candidate in known:
        folded = candidate.lower()
        if len(wanted) >= _SHORTEST_PART and wanted in folded:
            holding.append((len(folded), candidate))
            continue
        distance = _distance(wanted, folded, bound)
        if distance <= bound and distance < len(wanted):
            edited.append((distance, abs(len(folded) - len(wanted)), candidate != folded, candidate))
    best = min((distance for distance, *_ in edited), default=0)
    close = [candidate for distance, _, _, candidate in sorted(edited) if distance <= best + 1]
    return tuple(([candidate for _, candidate in sorted(holding)] + close)[:limit])


def did_you_mean(words: Iterable[str]) -> str | None:
    """The help line for some nearest words; None where there are none."""
    quoted = [f"`{word}`" for word in words]
    if not quoted:
        return None
    if len(quoted) == 1:
        return f"did you mean {quoted[0]}?"
    return f"did you mean {', '.join(quoted[:-1])} or {quoted[-1]}?"


def _distance(left: str, right: str, bound: int) -> int:
    """Edits from one word to the other, swaps of neighbours counted once; more than ``bound`` where it is more."""
    if abs(len(left) - len(right)) > bound:
        return bound + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        following = [i]
        for j, b in enumerate(right, 1):
            cost = min(row[j] + 1, following[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            following.append(cost)
        if min(following) > bound:
            return bound + 1
        before, row = row, following
    return row[-1]
