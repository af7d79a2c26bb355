"""What the scheduling lines of a policy came to where ``fully_shard`` gathers, as plain data of a report."""

from __future__ import annotations

from attrs import frozen


@frozen
class LineByFsdpReport:
    """The account of one ``bucket`` or ``prefetch`` line in eager."""

    source: str
    """``file:line``."""
    text: str
    """The line as it is written."""
    said: str
    """What came of it."""


@frozen
class FsdpOrderReport:
    """The account of one model's scheduling lines."""

    policy: str
    """Its name."""
    lines: tuple[LineByFsdpReport, ...] = ()
    differences: tuple[str, ...] = ()
    """Where FSDP does not stand as it was told."""
