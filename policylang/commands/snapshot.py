"""``policylang snapshot`` and ``import``: snapshots of a model's step and of recorded graphs."""

from __future__ import annotations

import argparse
from pathlib import Path

from policylang.commands import inputs
from policylang.commands.output import Exit, UsageError, doing, say
from policylang.errors import PolicyError
from policylang.graph.traced_device import attention_kernels
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device


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
    parser.add_argument("file", metavar="FILE", help="a recorded graph, .json or .json.gz")
    inputs.add_options(parser, "--import")
    inputs.add_snapshot(parser)


def import_recorded(options: argparse.Namespace) -> Exit:
    """Make a snapshot of a recorded graph: JSON, gzipped or not, as docs/snapshots.md describes it.

    Needs torch, which knows what the recorded operators are and what they cost.

    examples:

      policylang import recorded.json.gz -o recorded.graph

    exit codes: 0 written, 1 not a recorded graph, 2 a file that cannot be read or written
    """
    inputs.need_torch()
    from policylang.graph.recorded import recorded_facts
    from policylang.graph.snapshot import write

    with doing(f"reading {options.file}"):
        facts = recorded_facts(options.file)
    write(facts, options.output)
    inputs.print_snapshot(Path(options.output), facts)
    return Exit.CLEAN
