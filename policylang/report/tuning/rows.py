"""The whole trade-off as rows, and what distinguishes each policy from the one before in a phrase."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.language.figures import figure, shortened
from policylang.report.tuning.account import share_text
from policylang.report.width import table
from policylang.tuning.evaluation import Candidate
from policylang.tuning.tuned_policy import TunedPolicy, step_words

_LONGEST = 96


def trade_off_text(found: TunedPolicy, *, chosen: bool) -> str:
    """A row a policy, by rising memory; with ``chosen`` the one that is tuned is marked. No line end at the end."""
    tuned = found.tuned
    moved = any(each.offloaded for each in tuned.table)
    waits = any(each.exposed for each in tuned.table)
    head = ["", "peak", "saved", *(["offloaded"] if moved else []), "recomputed", "of the forward"]
    head += [*(["copies"] if moved else []), *(["exposed"] if waits else []), "step", "rules"]
    rows = [head]
    for each, phrase in zip(tuned.table, distinctions(tuned.table), strict=True):
        row = ["->" if chosen and each == tuned.chosen else "", figure(tuned.besides.on(each.peak), "bytes")]
        row += [figure(each.saved, "bytes"), *([figure(each.offloaded, "bytes")] if moved else [])]
        row += [figure(each.recompute, "seconds"), share_text(each.recompute, tuned)]
        row += [figure(each.copies, "seconds")] if moved else []
        row += [*([figure(each.exposed, "seconds")] if waits else []), step_words(each)]
        rows.append([*row, shortened(phrase, _LONGEST)])
    subject = found.subject
    heading = (
        f"{len(tuned.table)} policies for {subject.called} on {subject.device}, none better in both memory and time"
    )
    return f"{heading}\n\n{table(rows, right=range(1, len(head) - 1))}"


def distinctions(candidates: Sequence[Candidate]) -> list[str]:
    """Of the first its rules; of each other the rules that the one before does not have, or else those it lacks."""
    found, before = [], list[str]()
    for each in candidates:
        lines = statements(each)
        new = [line for line in lines if line not in before]
        gone = [line for line in before if line not in lines]
        if len(lines) == 1 or len(new) == len(lines):
            found.append("; ".join(lines))
        elif new:
            found.append("; ".join(new))
        else:
            found.append("without " + "; ".join(gone) if gone else "the same rules in another order")
        before = lines
    return found


def statements(each: Candidate) -> list[str]:
    """The rules of a candidate, a line each, without comments."""
    return [line.strip() for line in each.rules.splitlines() if line.strip() and not line.lstrip().startswith("#")]
