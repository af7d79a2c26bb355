"""``policylang snapshot``, ``import`` and ``import-torchtitan``: snapshots and policies of what others made."""

from __future__ import annotations

import argparse
from pathlib import Path

from policylang.api.load import operators_at_hand, operators_in
from policylang.commands.inputs import add_options, add_snapshot, print_snapshot, read_graph, refuse
from policylang.commands.output import Exit, UsageError, doing, say, write_output
from policylang.commands.users_code import UsersCodeError, named_function, need_torch, show, users_code
from policylang.errors import PolicyError
from policylang.graph.traced_device import attention_kernels
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import is_error
from policylang.language.lexer import is_policy_name
from policylang.language.loader import parse_policy


def snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what returns a graph, a traced step or a model")
    add_options(parser, "--import")
    add_snapshot(parser)
    parser.add_argument(
        "--device",
        metavar="cuda|cpu",
        help="trace as on this device, which need not be here (default: where the model is)",
    )
    parser.add_argument(
        "--compute-capability",
        metavar="M.N",
        help="of the GPU whose kernels are chosen: 8.0 is an A100, 9.0 an H100 (default: this machine's, else 9.0)",
    )


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
    need_torch()
    from policylang.api.snapshot import load_snapshot, write_snapshots
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
            function = named_function(options.function)
        with doing(f"tracing {options.function}"), users_code(), tracing_for(device):
            subject = function()
    except UsersCodeError as failed:
        return show(failed, "snapshot", options.function, "the function is called without arguments")
    with doing("reading the graph"):
        paths, found = write_snapshots(subject, options.output, device)
    for path in paths:
        facts = load_snapshot(path)
        print_snapshot(path, facts)
        if device is not None:
            kernels = ", ".join(f"{count} × {target}" for target, count in attention_kernels(facts).items())
            said = getattr(subject, "device", None) or device.kind
            say(f"traced as on {said}; attention: {kernels or 'none'}")
    if found:
        refuse(found)
    return Exit.CLEAN


def import_recorded_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recorded graph, .json or .json.gz")
    add_options(parser, "--import")
    add_snapshot(parser)


def import_recorded(options: argparse.Namespace) -> Exit:
    """Make a snapshot of a recorded graph: JSON, gzipped or not, as docs/snapshots.md describes it.

    Needs torch, which knows what the recorded operators are and what they cost.

    examples:

      policylang import recorded.json.gz -o recorded.graph

    exit codes: 0 written, 1 not a recorded graph, 2 a file that cannot be read or written
    """
    need_torch()
    from policylang.graph.recorded import recorded_facts
    from policylang.graph.snapshot import write

    with doing(f"reading {options.file}"):
        facts = recorded_facts(options.file)
    write(facts, options.output)
    print_snapshot(Path(options.output), facts)
    return Exit.CLEAN


def import_torchtitan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("selectors", metavar="SELECTORS", help="'MODULE::OPERATOR | MODULE::OPERATOR | …', quoted")
    parser.add_argument("-o", "--output", metavar="FILE", help="the policy, such as mine.apl; printed without it")
    parser.add_argument("--name", type=_policy_name, default="torchtitan_save_ops", help="the name of the policy")
    add_options(parser, "--graph", "--import")


def import_torchtitan(options: argparse.Namespace) -> Exit:
    """Write the policy equivalent to TorchTitan's full_recompute_save_ops string.

    The string selects operations by module and operator, `layers.*.moe.router.gate::aten.mm.default | …`. With --graph,
    the policy is also planned on a graph, which shows what the string selects there.

    examples:

      policylang import-torchtitan 'layers.*.moe.router.gate::aten.mm.default | layers.*.attention.wq::aten.mm.default'
      policylang import-torchtitan 'layers.*.attention.wq::aten.mm.default' -o mine.apl --graph deepseek.graph

    exit codes: 0 written, 1 something is wrong with the string or on the graph, 2 a file that cannot be read or written
    """
    from policylang.integrations.torchtitan_save_ops import import_save_ops

    facts = None if options.graph is None else read_graph(options.graph)
    operators = operators_at_hand(met=() if facts is None else operators_in(facts))
    made = import_save_ops(options.selectors, options.name, operators)
    if made.text is None:
        return refuse(made.diagnostics)
    found = list(made.diagnostics)
    if facts is not None:
        from policylang.api.planned_graphs import on_graph

        policy = parse_policy(made.text, name=options.output or f"<{options.name}>", operators=operators).policy
        if policy is not None:
            found.extend(on_graph(policy, {options.graph: facts}, None, one_model=False)[1])
    if found:
        refuse(found)
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
