"""``policylang snapshot``, ``import`` and ``import-torchtitan``: snapshots and policies of what others made."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from attrs import frozen

from policylang.api.load import operators_at_hand
from policylang.commands import inputs
from policylang.commands.output import Exit, UsageError, doing, say, write_output
from policylang.errors import PolicyError
from policylang.graph.traced_device import attention_kernels
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose, is_error
from policylang.language.globs import path_glob_problem
from policylang.language.lexer import is_policy_name
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


def snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what returns a graph, a traced step or a model")
    inputs.add_options(parser, "--import")
    inputs.add_snapshot(parser)
    help = "trace as on this device, which need not be here (default: where the model is)"
    parser.add_argument("--device", metavar="cuda|cpu", help=help)
    help = "of the GPU whose kernels are chosen: 8.0 is an A100, 9.0 an H100 (default: this machine's, else 9.0)"
    parser.add_argument("--compute-capability", metavar="M.N", help=help)


def snapshot(options: argparse.Namespace) -> Exit:
    """Write the facts of a graph to a file, for check, plan, explain and diff to plan on without the model.

    MODULE:FUNCTION names a Python function without arguments, package.module:function, that returns a graph module,
    what policylang.trace_step returned, or a model that was compiled under a policy and has run forward. The current
    folder is searched for it first, as `python -m` does.

    With --device cuda the steps that the function traces are traced as a GPU runs them, on a machine with or without
    one, from a model on the CPU or on `meta`, at true sizes and without memory for the weights.

    examples:

      policylang snapshot train.models:llama3_8b -o llama3_8b.graph
      policylang snapshot train.models:llama3_8b -o llama3_8b.graph --device cuda
      policylang snapshot train.models:moe -o moe.graph --import my_package.kernels

    exit codes: 0 written, 1 the function or its module failed, which is shown, or returned nothing that has a graph, 2
    no such function
    """
    inputs.need_torch()
    from policylang.api.planned_graphs import load_snapshot, write_snapshots
    from policylang.tracing.target_device import target_device, tracing_for

    try:
        device = target_device(options.device, options.compute_capability)
    except PolicyError as error:
        (diagnostic,) = error.diagnostics
        help = diagnostic.help or ""
        if options.device is not None and isinstance(read_device(options.device), DeviceProfile):
            help = f"{help}; the device profile is given to what shows times, as `policylang plan --device` does"
        raise UsageError(diagnostic.message, help) from None
    try:
        with doing(f"importing {options.function}"):
            function = inputs.named_function(options.function)
        with doing(f"tracing {options.function}"), inputs.users_code(), tracing_for(device):
            subject = function()
    except inputs.UsersCodeError as failed:
        return inputs.show(failed, "snapshot", options.function, "the function is called without arguments")
    with doing("reading the graph"):
        paths, found = write_snapshots(subject, options.output, device)
    for path in paths:
        facts = load_snapshot(path)
        inputs.print_snapshot(path, facts)
        if device is not None:
            kernels = ", ".join(f"{count} × {target}" for target, count in attention_kernels(facts).items())
            said = getattr(subject, "device", None) or device.kind
            say(f"traced as on {said}; attention: {kernels or 'none'}")
    if found:
        inputs.refuse(found)
    return Exit.CLEAN


def import_recorded_arguments(parser: argparse.ArgumentParser) -> None:
    help = "a recorded graph, .json or .json.gz; several, also snapshots, are the stages of a pipeline in their order"
    parser.add_argument("files", nargs="+", metavar="FILE", help=help)
    inputs.add_options(parser, "--import")
    inputs.add_snapshot(parser)


def import_recorded(options: argparse.Namespace) -> Exit:
    """Make a snapshot of a recorded graph: JSON, gzipped or not, as docs/snapshots.md describes it. Of several files,
    each the graph of one stage of a pipeline, make one snapshot, as docs/pipelines.md describes it.

    Needs torch, which knows what the recorded operators are and what they cost.

    examples:

      policylang import recorded.json.gz -o recorded.graph
      policylang import stage0.graph stage1.graph -o model.graph

    exit codes: 0 written, 1 not a recorded graph, or stages that do not fit together, 2 a file that cannot be read or
    written
    """
    inputs.need_torch()
    from policylang.graph.recorded import recorded_facts
    from policylang.graph.snapshot import write
    from policylang.graph.stages import joined_stages

    with doing(f"reading {', '.join(options.files)}"):
        several = len(options.files) > 1
        facts = joined_stages([*map(inputs.read_graph, options.files)]) if several else recorded_facts(options.files[0])
    write(facts, options.output)
    inputs.print_snapshot(Path(options.output), facts)
    return Exit.CLEAN


def import_torchtitan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("selectors", metavar="SELECTORS", help="'MODULE::OPERATOR | MODULE::OPERATOR | …', quoted")
    parser.add_argument("-o", "--output", metavar="FILE", help="the policy, such as mine.apl; printed without it")
    parser.add_argument("--name", type=_policy_name, default="torchtitan_save_ops", help="the name of the policy")
    inputs.add_options(parser, "--graph", "--import")


def import_torchtitan(options: argparse.Namespace) -> Exit:
    """Write the policy equivalent to TorchTitan's full_recompute_save_ops string.

    The string selects operations by module and operator, `layers.*.moe.router.gate::aten.mm.default | …`. With --graph,
    the policy is also planned on a graph, which shows what the string selects there.

    examples:

      policylang import-torchtitan 'layers.*.moe.router.gate::aten.mm.default | layers.*.attention.wq::aten.mm.default'
      policylang import-torchtitan 'layers.*.attention.wq::aten.mm.default' -o mine.apl --graph deepseek.graph

    exit codes: 0 written, 1 something is wrong with the string or on the graph, 2 a file that cannot be read or written
    """

    facts = None if options.graph is None else inputs.read_graph(options.graph)
    operators = operators_at_hand(met=() if facts is None else facts.operators)
    made = import_save_ops(options.selectors, options.name, operators)
    if made.text is None:
        return inputs.refuse(made.diagnostics)
    found = list(made.diagnostics)
    if facts is not None:
        from policylang.api.planned_graphs import on_graph

        policy = parse_policy(made.text, name=options.output or f"<{options.name}>", operators=operators).policy
        if policy is not None:
            found.extend(on_graph(policy, {options.graph: facts}, None, one_model=False)[1])
    if found:
        inputs.refuse(found)
    if any(map(is_error, found)):
        return Exit.DIAGNOSTICS
    if options.output is None:
        say(made.text.removesuffix("\n"), "policy")
    else:
        write_output(made.text, options.output)
    return Exit.CLEAN


def _policy_name(text: str) -> str:
    if not is_policy_name(text):
        raise argparse.ArgumentTypeError(f"`{text}` cannot be the name of a policy")
    return text
