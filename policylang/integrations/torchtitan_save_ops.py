"""Imports TorchTitan's ``full_recompute_save_ops`` as a policy: ``layers.*.moe.router.gate::aten.mm.default | …``.

The string is of the memory policy ``full`` of TorchTitan's graph trainer (pytorch/torchtitan PR 4153): every layer is
recomputed, except for its output, for random operators, and for the operations that the string selects. Each selector
is a pattern over the full name of a module, component by component, and an operator in full. There, a pattern or
operator that occurs nowhere is ignored silently; here, each selector becomes a rule, and a rule that matches nothing is
an error.
"""

from __future__ import annotations

import re

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose, is_error
from policylang.language.globs import path_glob_problem
from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable
from policylang.language.predicates import format_predicate
from policylang.language.shown import did_you_mean
from policylang.language.syntax import Match

CANNOT_BE_READ, MEANS_OTHERWISE = "APL530", "APL531"
NAME = "full_recompute_save_ops"

_OPERATOR = re.compile(r"\w+\.\w+(?:\.\w+)?")
_WITHOUT_OVERLOADS = ("higher_order", "builtin")
_EXAMPLE = "for example `layers.*.attention.wo::aten.mm.default`"
_HEAD = """\
# TorchTitan's memory policy `full`, with full_recompute_save_ops set to
#     {said}
# Written by `policylang import-torchtitan`; from here on it is yours.

policy {name}

include <torchtitan_full>  # every layer is computed again, but for what it hands to the next

# TorchTitan goes by the tags of operators, and the attention kernels are tagged as random.
optional save (random or aten.*scaled_dot_product*) in block

"""


@frozen
class Imported:
    """The policy's text; None where a diagnostic is an error."""

    text: str | None
    diagnostics: tuple[Diagnostic, ...]


def import_save_ops(said: str, name: str = "torchtitan_save_ops", operators: OperatorTable | None = None) -> Imported:
    """The policy equivalent to a ``full_recompute_save_ops`` string, or the errors in the string.

    ``operators``: the table of operator names; by default the bundled manifest.
    """
    source = Source(NAME, said)
    table = OperatorTable.bundled() if operators is None else operators
    rules: dict[str, None] = {}
    found: list[Diagnostic] = []
    start = 0
    for piece in said.split("|"):
        at = start + len(piece) - len(piece.lstrip())
        span = Span(source, at, max(at, start + len(piece.rstrip())))
        start += len(piece) + 1
        pattern, mark, operator = span.text.partition("::")
        if not mark or not pattern.strip() or not operator.strip() or "::" in operator:
            message = f"`{span.text}` is not `MODULE::OPERATOR`" if span.text else "there is no selector here"
            found.append(diagnose(CANNOT_BE_READ, message, span, help=_EXAMPLE))
            continue
        left = Span(source, span.start, span.start + len(pattern.rstrip()))
        right = Span(source, span.end - len(operator.lstrip()), span.end)
        problems = [each for each in (_of_pattern(left), _of_operator(right, table)) if each is not None]
        found += problems
        if not any(map(is_error, problems)):
            rules[f"save {right.text} where {format_predicate(Match('module', '==', left.text))}"] = None
    if any(map(is_error, found)):
        return Imported(None, tuple(found))
    text = _HEAD.format(said=" ".join(said.split()), name=name) + "".join(f"{rule}\n" for rule in rules)
    return Imported(text, (*found, *parse_policy(text, name=name, operators=table).diagnostics))


def _of_pattern(pattern: Span) -> Diagnostic | None:
    """Refuse what TorchTitan's patterns and ours read differently, and what neither reads."""
    text = pattern.text
    if any(part == "**" for part in text.split(".")):
        message, help = "`**` is one component in TorchTitan's patterns", "write as many `*` as the path has components"
    elif "{" in text or "}" in text:
        message, help = "a brace is an ordinary character in TorchTitan's patterns", "write a selector for each choice"
    elif text.startswith("/") or " " in text or '"' in text:
        message, help = f"`{text}` is the name of no module", _EXAMPLE
    else:
        problem = path_glob_problem(text)
        return diagnose("APL112", f"the module path `{text}` {problem}", pattern) if problem else None
    return diagnose(MEANS_OTHERWISE, message, pattern, help=help)


def _of_operator(operator: Span, table: OperatorTable) -> Diagnostic | None:
    text = operator.text
    namespace, *rest = text.split(".")
    if not _OPERATOR.fullmatch(text):
        return diagnose(CANNOT_BE_READ, f"`{text}` is no operator in full", operator, help=_EXAMPLE)
    known = table.matches(namespace, rest[0], None)
    if not table.has_namespace(namespace) or (table.is_only_met(namespace) and not known):
        message = f"no operator of the namespace `{namespace}` is known here; it is checked when applied"
        return diagnose("APL102", message, operator)
    if len(rest) == 1 and namespace not in _WITHOUT_OVERLOADS:
        message = f"`{text}` names no overload, and TorchTitan compares overloads"
        return diagnose(CANNOT_BE_READ, message, operator, help=did_you_mean((known or table.nearest(text))[:3]))
    if not table.matches(namespace, rest[0], rest[1] if len(rest) > 1 else None):
        help = did_you_mean(table.nearest(text))
        return diagnose("APL101", f"there is no operator `{text}`", operator, help=help)
    return None
