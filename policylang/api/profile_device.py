"""``policylang.profile_device``: from the machine it runs on to the file of a device profile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from policylang.errors import PolicyError, check_argument, check_progress, file_of
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import diagnose
from policylang.language.files import write_whole
from policylang.profiling.profiler import FIRST_COLUMNS, FIRST_LINE, profiled

NO_DEVICE, NO_FILE, NO_FIGURES = "APL616", "APL617", "APL618"
LEAST_SECONDS, MOST_SECONDS = 1.0, 24 * 3600.0


def profile_device(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    name: str | None = None,
    compiled: bool = False,
    seconds: float = 45.0,
    progress: Callable[[str], object] = lambda _: None,
) -> DeviceProfile:
    """Measure this machine and write the device profile to ``path``. Every ``device=`` takes that file.

    Measured are matmuls by dtype and size, streams of bytes by size, attention, convolutions, operators that compute
    more than they move, the overhead of a kernel, and copies to and from the host. The profile has the median of
    several rounds. In a job of several ranks with a default process group, call it on each: it then measures
    collectives too, and the first rank writes them to a ``.table`` file beside the profile.

    Args:
        path: The file, as ``our-machine.toml``. One that was measured before is replaced, any other is not.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; by default the GPU where torch sees one.
        name: Of the profile; by default the file's without its ending.
        compiled: For steps under ``torch.compile``: what its fusion leaves of pointwise operators is measured too.
        seconds: That the measurement may take, about. A round over all sizes is made in any case.
        progress: Called with what is measured next.

    Raises ``PolicyError`` where there is no such device, the file cannot be written, or nothing could be timed.
    """
    target = file_of("path", path)
    check_argument("name", name, isinstance(name, str | None), "the name of a profile, as a text")
    check_argument("seconds", seconds, isinstance(seconds, int | float), "a number of seconds")
    check_progress(progress)
    table = target.with_suffix(".table")
    title = target.stem if name is None else name
    problems: list[PolicyError | None] = [_first_problem(target, table, title, seconds, device)]
    if _ranks() > 1:  # where one rank cannot go on, the others would wait for it
        import torch.distributed as dist

        mine, problems = problems[0], [None] * _ranks()
        dist.all_gather_object(problems, mine)
    if (problem := next(filter(None, problems), None)) is not None:
        raise problem
    where = _device(device)
    found = profiled(where, title, table.name, compiled=compiled, budget=seconds, progress=progress)
    if found is None:
        said = None
        try:
            torch.mm(torch.ones(2, 2, device=where), torch.ones(2, 2, device=where))
        except RuntimeError as error:
            said = str(error).splitlines()[0][:200]
        raise _problem(NO_FIGURES, f"nothing could be timed on `{where}`", said)
    for file, text in ((table, found.table), (target, found.text)) if _is_first() else ():
        try:
            if text:
                write_whole(file, text.encode())
        except OSError as error:
            raise _problem(NO_FILE, f"cannot write `{file}`: {error.strerror or error}") from None
    return found.profile


def _first_problem(
    target: Path, table: Path, title: str, seconds: float, device: str | torch.device | None
) -> PolicyError | None:
    """Check device, arguments and files before anything is measured."""
    try:
        _device(device)
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            raise _problem(NO_DEVICE, f"`{seconds:g}` seconds are no time to measure in", "a second to a day")
        if not title.strip() or not (title + table.name).isprintable() or len(title) > 100:
            message = "the name of a profile is a text of one line, of at most 100 characters"
            raise _problem(NO_FILE, message, "give it a name, or its file another one")
        if _is_first():
            check_writable(target, FIRST_LINE)
            if _ranks() > 1:
                check_writable(table, FIRST_COLUMNS[0])
    except PolicyError as error:
        return error
    return None


def _device(asked: str | torch.device | None) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError, ValueError):
        raise _problem(NO_DEVICE, f"there is no device `{asked}`", "`cuda`, `cuda:1` or `cpu`") from None
    if device.type not in ("cuda", "cpu"):
        raise _problem(NO_DEVICE, f"a device of the kind `{device.type}` is not measured", "`cuda` or `cpu`")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise _problem(NO_DEVICE, "torch sees no CUDA device here", "`cpu` measures the processor")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= count:
            raise _problem(NO_DEVICE, f"there is no device `{asked}`", f"torch sees {count}, from `cuda:0` on")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def check_writable(path: Path, begins: str) -> None:
    """Raises PolicyError where a measurement could not be written there, or would replace what is no measurement."""
    shown = os.fspath(path)
    try:
        if path.is_dir():
            raise _problem(NO_FILE, f"`{shown}` is a folder", "name a file in it: `our-machine.toml`")
        if path.exists():
            ours = False
            if path.is_file():  # a terminal or a pipe would be waited for
                with path.open(encoding="utf-8", errors="replace") as file:
                    ours = file.read(200).lstrip().startswith(begins)
            if not ours:
                help = "name another file, or move it away"
                raise _problem(NO_FILE, f"`{shown}` is there, and no measurement wrote it", help)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _problem(NO_FILE, f"cannot write `{shown}`: {reason}") from None


def _ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_first() -> bool:
    import torch.distributed as dist

    return _ranks() == 1 or dist.get_rank() == 0


def _problem(code: str, message: str, help: str | None = None) -> PolicyError:
    return PolicyError([diagnose(code, message, help=help)])
