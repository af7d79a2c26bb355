"""A tuned policy: its text, what it comes to, and what there was to choose among."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen

from policylang.language.diagnostics import Diagnostic
from policylang.language.files import write_whole
from policylang.language.wording import as_html

if TYPE_CHECKING:  # whatever imports policylang imports this module
    from policylang.tuning.outcome.written import TuningSubject
    from policylang.tuning.trade_off import Candidate, Tuned


@frozen(eq=False)
class TunedPolicy:
    """What :func:`policylang.tune` returns. ``str()`` is the policy's text; a notebook shows the trade-off.

    Bytes are those of one rank, times those of the device profile.
    """

    text: str
    """The policy, as a file holds it."""
    tuned: Tuned = field(repr=False)
    """The choice as plain data."""
    subject: TuningSubject
    """What it is tuned for."""
    notes: tuple[Diagnostic, ...] = ()
    """What is to be said beside it, such as that nothing has to be recomputed."""

    @property
    def rules(self) -> str:
        """The statements that decide, a line each."""
        return self.tuned.chosen.rules

    @property
    def peak(self) -> int:
        """Bytes of the step at its highest moment: of the graph, of the optimizer's state, and in reserve."""
        return self.tuned.besides.on(self.tuned.chosen.peak)

    @property
    def graph_peak(self) -> int:
        """Bytes of the graph alone at its highest moment: what ``expect peak`` is held against."""
        return self.tuned.chosen.peak

    @property
    def saved(self) -> int:
        """Bytes kept on the device for the backward."""
        return self.tuned.chosen.saved

    @property
    def offloaded(self) -> int:
        """Bytes kept on the host for the backward."""
        return self.tuned.chosen.offloaded

    @property
    def recompute_seconds(self) -> float:
        """Seconds of second runs."""
        return self.tuned.chosen.recompute

    @property
    def recompute_share(self) -> float:
        """The same as a fraction of the forward's time; 0 where the forward takes none."""
        return self.recompute_seconds / self.tuned.forward if self.tuned.forward else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return self.tuned.chosen.step

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which computation waits for a collective or a copy."""
        return self.tuned.chosen.exposed

    @property
    def copies_seconds(self) -> float:
        """Of these, seconds that copies to the host and back add: zero where computation hides them."""
        return self.tuned.chosen.copies

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward."""
        return self.tuned.forward

    @property
    def bound_seconds(self) -> float | None:
        """Seconds of second runs that no choice of values can go below that saves as many bytes; None where that is
        not known."""
        return self.tuned.bound

    @property
    def table(self) -> tuple[Candidate, ...]:
        """The whole trade-off, by rising memory: every policy that no other beats in both memory and time."""
        return self.tuned.table

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy to a file, in one step; returns where it is. Raises ``OSError`` where it cannot."""
        target = Path(path)
        write_whole(target, self.text.encode())
        return target

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return as_html(self)
