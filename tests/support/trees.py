"""Policies built without a parser: the trees that planning takes, with spans over the text they stand for."""

from policylang.language.diagnostics import Source, Span
from policylang.language.syntax import Expectation, Policy, Rule, Undecided


def span(text: str, line: int = 1) -> Span:
    """A span over all of ``text``, on some line of a file named ``test.apl``."""
    lead = "\n" * (line - 1)
    return Span(Source("test.apl", lead + text), len(lead), len(lead) + len(text))


def policy_of(
    *rules: Rule, expectations: tuple[Expectation, ...] = (), undecided: str | None = "auto", **more
) -> Policy:
    fields = {"lets": {}, "blocks": None, "rewrites": ()}
    fields |= more
    return Policy(
        name="test",
        rules=rules,
        expectations=expectations,
        undecided=None if undecided is None else Undecided(undecided, span=span(f"undecided -> {undecided}")),
        **fields,
    )
