"""``policylang tune`` and ``profile``: a policy from a budget, and the device profile of this machine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from pathlib import Path

from policylang.commands.inputs import (
    NO_RUN,
    add_options,
    add_pipeline,
    need_torch,
    pipeline_of,
    read_graph,
    read_run,
    refuse,
    take_graph,
)
from policylang.commands.output import Exit, UsageError, add_form, say, status_line, tell, write_output
from policylang.errors import PolicyError, PolicyGraphError, PolicyMatchError, PolicyMeaningError
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile, slower
from policylang.language.devices.reading import bundled_devices
from policylang.language.diagnostics import diagnose


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--graph")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--peak", metavar="SIZE", help="what the step may take at its highest moment, such as '70 GiB'")
    budget.add_argument("--saved", metavar="SIZE", help="what may be kept for the backward, such as '6 GiB'")
    budget.add_argument(
        "--recompute-time", metavar="SHARE", help="how much of the forward's time recomputation may take, such as 5%%"
    )
    add_options(parser, "--device")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the policy goes, such as llama3_8b_70g.apl")
    parser.add_argument(
        "--optimizer",
        metavar="NAME|SIZE",
        help="count its state in the peak: adamw, sgd and others by what they keep for each parameter in its own "
        "dtype, or a size, such as '24 GiB'",
    )
    help = "set aside so much of the memory for the allocator, such as 5%%"
    parser.add_argument("--reserve", metavar="SHARE", default="0%", help=help)
    help = "scale times and the reserve by a run that `policylang.watch` recorded"
    parser.add_argument("--measured", metavar="FILE", help=help)
    parser.add_argument("--offload", action="store_true", help="let values be copied to the host as well")
    help = "do not cut the loss or an MLP into slices, whose sums round otherwise"
    parser.add_argument("--no-chunk", dest="chunk", action="store_false", help=help)
    parser.add_argument("--no-order", dest="order", action="store_false", help="leave collectives as they were traced")
    parser.add_argument("--lossy", action="store_true", help="let values be kept in a narrower type as well")
    help = "how evenly tokens are routed to experts: '1.0', or 'up to 2.0' for at most twice an expert's share"
    parser.add_argument("--balance", metavar="LOAD", help=help)
    parser.add_argument("--table", action="store_true", help="print the whole trade-off, one policy per row")
    add_pipeline(parser)
    add_options(parser, "--path", "--no-project", "--import")
    add_form(parser, "json")


def tune(options: argparse.Namespace) -> Exit:
    """Write a policy from a budget: the one that loses the least time within so much memory, or takes the least memory
    for so much time.

    The graph is a snapshot (see `policylang snapshot`); no model and no GPU are needed. --peak limits the peak of the
    step, parameters and gradients included; --optimizer adds the optimizer's state to it, --reserve what the allocator
    wastes. --saved limits the bytes saved for the backward alone, --recompute-time the time of recomputation. The
    result is a policy as a person writes it, with a comment on its origin and its neighbours, and an expectation of the
    budget.

    Without -o the policy is printed, and its figures go to the standard error. --table prints the whole trade-off, one
    policy per row, and needs no budget.

    --schedule, --stages and --microbatches tune the model as a pipeline: --peak is then what each rank may take, and
    stages with more microbatches in flight save less. The graph is one microbatch through the whole model.

    examples:

      policylang tune --graph my.graph --peak "70 GiB" --device h100-sxm -o 70g.apl
      policylang tune --graph my.graph --peak "70 GiB" --device b200 --reserve 5%
      policylang tune --graph my.graph --saved "6 GiB" --device a100-sxm-80gb
      policylang tune --graph my.graph --recompute-time 5% --device cluster.toml
      policylang tune --graph my.graph --device h100-sxm --table
      policylang tune --graph my.graph --peak "70 GiB" --device h100-sxm --schedule 1f1b --stages 4 --microbatches 16

    exit codes: 0 tuned, 1 no policy meets the budget, or the graph or the profile cannot be used (no file is written
    then), 2 a malformed budget, or a file that cannot be read or written
    """
    from policylang.api.tune import no_budget, read_or_raise, tuned_policy
    from policylang.report.plan_comparison import account_text, trade_off_text, tuned_json
    from policylang.tuning.budgets import read_budget
    from policylang.tuning.evaluation import Allowed

    device = take_graph(options)
    if device is None:
        known = ", ".join(bundled_devices())
        raise UsageError("times need a device", f"name one with `--device`: {known}, or the path of a file")
    given = options.peak, options.saved, options.recompute_time
    if options.output and all(each is None for each in given):
        raise UsageError("a policy is tuned for a budget, and none is given", "add `--peak`, or leave `-o` out")
    facts, pipeline = read_graph(options.graph), pipeline_of(options)
    if options.measured is not None:
        device = _as_measured(options, facts, device)
    try:
        budget = read_or_raise(read_budget(*given))
        if budget is None and not options.table:
            raise PolicyMeaningError([no_budget(device)])
        with status_line() as progress:
            found = tuned_policy(
                facts,
                Path(options.graph).name,
                device,
                budget,
                optimizer=options.optimizer,
                reserve=options.reserve,
                named=options.device,
                folder=Path(options.output).parent if options.output else Path(),
                also=Allowed(options.offload, options.chunk, options.order, options.lossy),
                balance=options.balance,
                path=options.path,
                table=options.table,
                progress=progress,
                pipeline=pipeline,
            )
    except (PolicyMeaningError, PolicyGraphError, PolicyMatchError) as error:
        refuse(error.diagnostics, options.output_format)
        return Exit.USAGE if isinstance(error, PolicyMeaningError) else Exit.DIAGNOSTICS
    if options.output:
        write_output(found.text, options.output)
    if options.output_format == "json":
        say(tuned_json(found, chosen=budget is not None), "json")
        return Exit.CLEAN
    if found.notes:
        refuse(found.notes)
    if options.table:
        say(trade_off_text(found, chosen=budget is not None))
    if budget is not None and (options.output or options.table):
        say(("\n" if options.table else "") + account_text(found))
    elif budget is not None:
        tell(account_text(found))
        say(found.text.removesuffix("\n"), "policy")
    return Exit.CLEAN


def _as_measured(options: argparse.Namespace, facts: Facts, device: DeviceProfile) -> DeviceProfile:
    """The profile with its times scaled by what a run took; sets the reserve to what the run needed, if that is more.

    Raises ``PolicyGraphError`` for a run of another graph, and one without a plan."""
    from policylang.tuning.budgets import read_reserve
    from policylang.tuning.tuned_policy import fingerprint

    run = read_run(options.measured)
    planned, measured = run["planned"], run["measured"]
    if planned is None or planned["graph"] != fingerprint(facts):
        message = f"`{options.measured}` was recorded of another graph than `{options.graph}`, or without one"
        raise PolicyGraphError([diagnose(NO_RUN, message, help="give `policylang.watch` this graph: `graph=`")])
    most = max(measured["reserved_bytes"] or 0, measured["state_bytes"] + measured["graph_bytes"])
    needed, given = 1 - (planned["peak_bytes"] + measured["state_bytes"]) / most, read_reserve(options.reserve)
    if isinstance(given, float) and needed > given:
        options.reserve = f"{ceil(needed * 1000) / 10:g}%"
        tell(f"policylang tune: the run took more than was planned: {options.reserve} in reserve")
    if planned["step_seconds"] is None or planned["device"] != device.name:
        tell(f"policylang tune: times stay as they are: the run was planned without the profile `{device.name}`")
        return device
    exposed, waited = planned["exposed_seconds"], measured["exposed_seconds"]
    computing = (measured["step_seconds"] - waited) / (planned["step_seconds"] - exposed)
    waiting = waited / exposed if exposed and waited else 1.0
    tell(f"policylang tune: computing takes {computing:.2f}× as long as planned, waiting {waiting:.2f}×")
    return slower(device, computing, waiting)


def profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the profile, such as our-machine.toml")
    parser.add_argument(
        "--device", metavar="cuda|cpu", help="what to measure (default: the GPU where torch sees one, else the CPU)"
    )
    parser.add_argument("--name", help="of the profile (default: the file's without its ending)")
    parser.add_argument("--compiled", action="store_true", help="measure for steps that run under torch.compile")
    help = "how long it may take, about; one round is made in any case (default: 45)"
    parser.add_argument("--seconds", type=float, default=45.0, metavar="N", help=help)
    add_form(parser, "json")


def profile(options: argparse.Namespace) -> Exit:
    """Measure this machine, and write a device profile: what it computes, moves and sends in a second. Give the file to
    other commands: policylang plan mine.apl --graph my.graph --device our-machine.toml.

    Measured are matrix products by dtype and size, streams of bytes by size, attention, convolutions, the operators
    that compute more than they move, the overhead of a kernel, and copies to and from the host. On a CPU with the
    threads that torch has here: OMP_NUM_THREADS=8 policylang profile … for eight. With --compiled the profile is for
    steps under torch.compile, whose fusion of pointwise operators is measured too.

    Under torchrun the collectives of its ranks are measured as well, and written to a table beside the profile.

    examples:

      policylang profile -o our-machine.toml
      policylang profile -o our-machine-compiled.toml --compiled --seconds 20
      torchrun --nproc-per-node 8 -m policylang profile -o our-node.toml

    exit codes: 0 written, 1 nothing could be timed, 2 no such device, or a file that cannot be written
    """
    need_torch()
    from policylang.api.profile_device import NO_FIGURES, profile_device

    with _job(options.device, options.seconds) as (rank, device):
        if rank == 0 and hasattr(os, "getloadavg") and os.getloadavg()[0] >= (os.cpu_count() or 1):
            message = "other processes compute on this machine, so the figures are too low"
            tell(f"policylang profile: {message}\nhelp: measure again on an idle machine")
        try:
            with status_line(shown=rank == 0) as progress:
                profile = profile_device(
                    options.output,
                    device=device,
                    name=options.name,
                    compiled=options.compiled,
                    seconds=options.seconds,
                    progress=progress,
                )
        except PolicyError as error:
            (diagnostic,) = error.diagnostics
            if diagnostic.code == NO_FIGURES:
                raise
            raise UsageError(diagnostic.message, diagnostic.help or "") from None
    if rank == 0 and options.output_format == "json":
        figures = json.loads(profile.canonical)
        say(json.dumps({"path": options.output, "name": profile.name, "figures": figures}), "json")
    elif rank == 0:
        fastest = {dtype: max(each for _, each in rate.points) for dtype, rate in profile.compute.items()}
        products = ", ".join(f"{each / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, each in fastest.items())
        stream = max(each for _, each in profile.bandwidth.points)
        say(f"{options.output}: products reach {products}; streams up to {stream / 1e9:,.1f} GB/s")
    return Exit.CLEAN


@contextmanager
def _job(device: str | None, seconds: float) -> Iterator[tuple[int, str | None]]:
    """The ranks that torchrun started, joined: this one's number, and the device that it measures."""
    import torch
    import torch.distributed as dist

    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        yield 0, device
        return
    if not dist.is_available():
        raise UsageError("this torch has no torch.distributed", "measure without torchrun")
    on_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    if on_gpu:
        if ":" in (device or ""):
            raise UsageError(f"each rank needs its GPU to measure on, not `{device}`", "leave out the number")
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    # The others wait while the first measures its device. Ranks exchange messages over gloo, with a GPU or not.
    longest = timedelta(seconds=600 + (4 * seconds if 0 < seconds < 1e6 else 0))
    with_gpu = on_gpu and torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_gpu else "gloo", timeout=longest)
    try:
        yield dist.get_rank(), device
    finally:
        dist.destroy_process_group()
