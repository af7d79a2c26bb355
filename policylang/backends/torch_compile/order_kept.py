"""Has Inductor keep the order that a policy gave to a half.

Inductor's scheduler sorts what it lowers, by memory or by what it fuses, and has several passes that move or join
collectives. Two things keep it from that, and both go along with the compile, so that they hold for the backward too,
which is compiled when the first one starts:

- the settings that move collectives are off;
- a pass that runs last on either half makes its order binding: every start of a collective and every wait runs after
  the one before it and after the products in between, and products run after the start or wait before them. These are
  torch's ``control_deps``, which its own overlap scheduler places.

Of products alone, since their kernels stand alone: a pointwise kernel runs with whatever it is fused with, and a
dependency of its own would end that fusion. What that comes to: no fused kernel pulls a collective across a product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from policylang.audit.code_audit import CodeAudit
from policylang.backends.caching.keyed import KeyedForCaches
from policylang.errors import PolicyAuditError, PolicyMeaningError, PolicyWarning
from policylang.language.diagnostics import Diagnostic, diagnose, is_error
from policylang.language.syntax import Policy
from policylang.operators.categories import describe
from policylang.operators.communication import is_communication, is_product
from policylang.torch_compat import dynamo, inductor
from policylang.torch_compat.graphs import OpOverload

OPTION_AGAINST_ORDER = "APL342"
SETTING_TURNED_OFF = "APL343"
TAKEN_APART = "APL348"

_LAST_PASS = "post_grad_custom_post_pass"
_HARMLESS = frozenset({"reorder_for_peak_memory"})
"""On by default, and what it moves it moves within what is binding."""

_ONE_PASS = "leave it out, or this line; from torch 2.13 on both can be"
_NO_COMPILED_AUTOGRAD = "leave `torch._dynamo.config.compiled_autograd` off, or the line out"
_COPIES = tuple(f"policylang.{name}." for name in ("offload", "reload", "wait"))

_Base: Any = inductor.graph_pass_base()


class BindingOrder(KeyedForCaches, _Base):  # type: ignore[misc]
    """Makes the order of a half's collectives, as its nodes stand, binding for all that Inductor does after it."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, graph: fx.Graph) -> None:
        unread = {node: [each for each in others if node not in each.users] for node, others in _after(graph).items()}
        inductor.run_after(graph, {node: others for node, others in unread.items() if others})


def _after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What is to run after what. As many pairs as there are nodes at most. Copies to the host and back are ordered as
    collectives are."""
    found: dict[fx.Node, list[fx.Node]] = {}
    last: list[fx.Node] = []
    products: list[fx.Node] = []
    for node in graph.nodes:
        if is_communication(node) or describe(node.target).name.startswith(_COPIES):
            found[node] = [*last, *products]
            last, products = [node], []
        elif inductor.is_lowered_as_one(node.target):
            products.append(node)
        elif is_product(node):
            products.append(node)
            if isinstance(node.target, OpOverload):
                found[node] = last
    return found


def settings_to_keep(policy: Policy, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a policy that orders; ``given``: what ``torch.compile`` was given, which stays.

    Raises ``PolicyMeaningError`` where that asks for another order, and under compiled autograd; warns where the
    program's settings do.
    """
    if dynamo.compiles_backwards_anew():
        message = "compiled autograd takes the backward apart and compiles it anew, where this line's order is not kept"
        raise PolicyMeaningError([diagnose(TAKEN_APART, message, _first_line(policy), help=_NO_COMPILED_AUTOGRAD)])
    keep = inductor.settings_in_order()
    against = {name: value for name, value in keep.items() if name not in _HARMLESS}
    asked = [name for name, value in against.items() if name in given and given[name] != value]
    if asked:
        raise PolicyMeaningError([_against(policy, name) for name in asked])
    unheard = [
        name for name, value in against.items()
        if name not in given and inductor.is_set(name) and inductor.setting(name) != value
    ]  # fmt: skip
    if unheard:
        found = PolicyMeaningError([_turned_off(policy, name) for name in unheard])
        warnings.warn(str(found), PolicyWarning, stacklevel=2)
    return {**keep, **given}


def last_passes(policy: Policy, given: Mapping[str, Any], key: str) -> Any:
    """What stands where Inductor takes its last pass on a half: the user's own passes, then the one that binds.

    Raises ``PolicyMeaningError`` where the user has one and this torch takes no second.
    """
    own = given[_LAST_PASS] if _LAST_PASS in given else inductor.setting(_LAST_PASS)
    ours = BindingOrder(f"order:{key}")
    if not own:
        return {_LAST_PASS: ours}
    if not inductor.takes_lists_of_passes():
        message = (
            f"this torch takes one `{_LAST_PASS}`, there is one already, and what keeps this line's order is another"
        )
        raise PolicyMeaningError([diagnose(OPTION_AGAINST_ORDER, message, _first_line(policy), help=_ONE_PASS)])
    return {_LAST_PASS: [*(own if isinstance(own, (list, tuple)) else (own,)), ours]}


def watched_half(code: CodeAudit, graph: fx.Graph, is_backward: bool) -> Callable[[str], None]:
    """From a half as it comes to Inductor to what compares the code that is made of it with its order.

    That raises ``PolicyAuditError``: of the forward while it is compiled, of the backward when the first one starts.
    """
    read = code.reader(graph, is_backward=is_backward)
    return lambda source: _raise(read(source))


def check_loaded(code: CodeAudit | None, loaded: Iterable[tuple[bool, str]]) -> None:
    """The same of halves that come from a cache, with whether each is the backward. Raises ``PolicyAuditError``."""
    if code is not None:
        _raise(code.check_loaded(loaded))


def _raise(found: Sequence[Diagnostic]) -> None:
    errors = [each for each in found if is_error(each)]
    if errors:
        raise PolicyAuditError(errors)
    if found:
        warnings.warn(str(PolicyAuditError(found)), PolicyWarning, stacklevel=2)


def _first_line(policy: Policy) -> Any:
    return (*policy.scheduling, *policy.buckets)[0].span


def _against(policy: Policy, name: str) -> Any:
    message = f"the option `{name}` of torch.compile and this line both say in which order collectives run"
    return diagnose(OPTION_AGAINST_ORDER, message, _first_line(policy), help=f"leave out `{name}`, or this line")


def _turned_off(policy: Policy, name: str) -> Any:
    message = f"`torch._inductor.config.{name}` is set, and off for what is compiled under this policy"
    return diagnose(SETTING_TURNED_OFF, message, _first_line(policy), help="the order is the one that this line gives")
