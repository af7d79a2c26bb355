"""What a policy text is told, in a form that tests can write down."""

from __future__ import annotations

from attrs import frozen

from policylang.language.diagnostics import Diagnostic
from policylang.language.loader import parse_policy
from policylang.language.syntax import Policy, Rule, Selector


@frozen
class Told:
    code: str
    underlined: str
    message: str
    help: str | None = None


def told(text: str) -> list[Told]:
    return [as_told(each) for each in parse_policy(text).diagnostics]


def as_told(diagnostic: Diagnostic) -> Told:
    underlined = diagnostic.span.text if diagnostic.span is not None else ""
    return Told(diagnostic.code, underlined, diagnostic.message, diagnostic.help)


def policy(text: str) -> Policy:
    """The policy of a text that is free of errors and warnings, but for `and` of two operators: it has a meaning."""
    loaded = parse_policy(text)
    assert {each.code for each in loaded.diagnostics} <= {"APL151"}
    assert loaded.policy is not None
    return loaded.policy


def rule(text: str) -> Rule:
    (only,) = policy(text).rules
    return only


def selector(text: str) -> Selector:
    return rule(f"save {text}").selector
