"""What the tests keep for good, out of the garbage collector's way."""

from __future__ import annotations

import gc


def settle() -> None:
    """Whatever is alive now is not walked by later collections, nor ever freed by one.

    Libraries and traced models come to millions of objects, and there are hundreds of collections (of Dynamo, of what
    measures memory): they were half of the suite's time.
    """
    gc.collect()
    gc.freeze()
