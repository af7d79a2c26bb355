"""What the tests keep for good, out of the garbage collector's way."""

import gc

RARELY = (50_000, 20, 20)
"""Thresholds of the generations. A trace makes millions of objects that live on, and with Python's own 700 a tenth of
the time of a test goes into looking for garbage among them."""


def settle() -> None:
    """Whatever is alive now is not walked by later collections, nor ever freed by one.

    Libraries and traced models come to millions of objects, and there are hundreds of collections (of Dynamo, of what
    measures memory): they were half of the suite's time.
    """
    gc.collect()
    gc.freeze()


def settle_new_process() -> None:
    """Of a process that was forked from one with all libraries: there is nothing to collect yet.

    What is walked is also copied: a collection writes to every object that it visits, on pages shared until then.
    """
    gc.freeze()
    gc.set_threshold(*RARELY)
