"""How many examples hypothesis draws: few where a change waits for the verdict, many in a search for new ones."""

import os

SEARCHES = os.environ.get("HYPOTHESIS_PROFILE", "same") != "same"
"""Whether this run draws new examples."""


def examples(quick: int, searched: int) -> int:
    """``quick`` in the suite that decides whether a change goes in, where the examples are the same each time."""
    return searched if SEARCHES else quick
