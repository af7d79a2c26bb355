"""Measure this machine, and write a device profile: what it computes, moves and sends in a second. Give the file to
other commands: policylang plan mine.apl --graph my.graph --device our-machine.toml.

Measured are matrix products by dtype and size, streams of bytes by size, attention, convolutions, the operators that
compute more than they move, the overhead of a kernel, and copies to and from the host. On a CPU with the threads that
torch has here: OMP_NUM_THREADS=8 policylang profile … for eight. With --compiled the profile is for steps under
torch.compile, whose fusion of pointwise operators is measured too.

Under torchrun the collectives of its ranks are measured as well, and written to a table beside the profile.

examples:

  policylang profile -o our-machine.toml
  policylang profile -o our-machine-compiled.toml --compiled --seconds 20
  torchrun --nproc-per-node 8 -m policylang profile -o our-node.toml

exit codes: 0 written, 1 nothing could be timed, 2 no such device, or a file that cannot be written
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from policylang.commands.inputs import add_form
from policylang.commands.output import Exit, UsageError, say, status_line, tell
from policylang.commands.users_code import need_torch
from policylang.errors import PolicyError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the profile, such as our-machine.toml")
    parser.add_argument(
        "--device", metavar="cuda|cpu", help="what to measure (default: the GPU where torch sees one, else the CPU)"
    )
    parser.add_argument("--name", help="of the profile (default: the file's without its ending)")
    parser.add_argument("--compiled", action="store_true", help="measure for steps that run under torch.compile")
    parser.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        metavar="N",
        help="how long it may take, about; one round is made in any case (default: 45)",
    )
    add_form(parser, "json")


def run(options: argparse.Namespace) -> Exit:
    need_torch()
    from policylang.api.profile_device import NO_FIGURES, profile_device

    with _job(options.device, options.seconds) as (rank, device):
        if rank == 0 and hasattr(os, "getloadavg") and os.getloadavg()[0] >= (os.cpu_count() or 1):
            message = "others compute on this machine, and what is measured is what they leave of it"
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
