"""Operators that a model chooses under a compiler alone, where a policy is planned for eager checkpoints: a rule that
names one of the two forms matches it on one of the two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policylang.graph.facts import Facts
from policylang.graph.traced_device import OTHER_KERNELS
from policylang.language.diagnostics import Diagnostic, Fix, diagnose, written
from policylang.language.syntax import Operator, Policy, Rule
from policylang.language.walk import walk, with_lets
from policylang.operators.names import STAND_INS
from policylang.planning.selection.selectors import operator_matcher


def named_alone(policy: Policy, facts: Facts) -> Iterator[Diagnostic]:
    """A warning for each rule that names what a graph made by a compiler has in place of an eager operator, or that
    operator, and not both, unless another rule with the same action names the other."""
    forms = {compiled: eager for compiled, eager in STAND_INS.items() if compiled in facts.by_target}
    if not forms:
        return
    named = [_names(rule, policy) for rule in policy.rules]
    for compiled, eager in forms.items():
        sides = [(any(each(compiled) for each in names), any(each(eager) for each in names)) for names in named]
        found = {(rule.action, *side) for rule, side in zip(policy.rules, sides, strict=True)}
        for rule, (in_graph, in_eager) in zip(policy.rules, sides, strict=True):
            if in_graph != in_eager and (rule.action, in_eager, in_graph) not in found:
                yield diagnose(
                    OTHER_KERNELS,
                    f"`{rule.text}` names one of two forms: the graph, made under a compiler, has `{compiled}` where "
                    f"the model most likely runs `{eager}` in eager",
                    rule.span,
                    help=f"name both, `{_bare(eager)}, {_bare(compiled)}`, or say `matmul`",
                    mends=_both(rule, eager, compiled),
                )


def _both(rule: Rule, *forms: str) -> tuple[Fix, ...]:
    """The mends that name both in place of the one that the rule itself names."""
    named = [part for part in walk(rule.selector) if isinstance(part, Operator)]
    alone = [part.span for part in named if any(map(operator_matcher(part), forms))]
    return written(alone[0], [f"({', '.join(map(_bare, forms))})", "matmul"], is_choice=True) if len(alone) == 1 else ()


def _names(rule: Rule, policy: Policy) -> list[Callable[[str], bool]]:
    return [operator_matcher(part) for part in with_lets(policy, rule.selector) if isinstance(part, Operator)]


def _bare(target: str) -> str:
    return target.rpartition(".")[0]
