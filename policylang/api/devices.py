"""``policylang.load_device``: a device profile from a file or by its bare name."""

from __future__ import annotations

import os

from attrs import evolve

from policylang.errors import PolicyMeaningError
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.statements import format_policy
from policylang.language.syntax import Policy

DeviceLike = DeviceProfile | str | os.PathLike[str]
"""A device profile, the path of one, or the bare name of a bundled one."""

TRACED_FOR = "APL416"
_TYPES = frozenset({"cuda", "gpu", "hip", "hpu", "meta", "mps", "mtia", "xla", "xpu"})


def load_device(name: str | os.PathLike[str]) -> DeviceProfile:
    """The device profile of a file, or a bundled one by its bare name, as ``h100-sxm``.

    Raises :class:`PolicyMeaningError` for a name that there is not, and for a file that is no profile.
    """
    found = read_device(name)
    if isinstance(found, Diagnostic):
        raise PolicyMeaningError([_unlike_tracing(str(name), found)])
    return found


def device_of(given: DeviceLike | None) -> DeviceProfile | None:
    """The device that is given, loaded if need be; raises as :func:`load_device` does."""
    return given if given is None or isinstance(given, DeviceProfile) else load_device(given)


def on_device(policy: Policy, device: DeviceLike | None) -> Policy:
    """The policy with a device in place of its own, so that it counts wherever the policy does: in plans, digests and
    the keys of caches. Raises as :func:`load_device` does."""
    profile = device_of(device)
    if profile is None:
        return policy
    moved = evolve(policy, device=profile)
    return evolve(moved, canonical=format_policy(moved)) if policy.canonical else moved


def _unlike_tracing(name: str, found: Diagnostic) -> Diagnostic:
    """What a step is traced for is called a device too: of one that is meant here, the difference."""
    if name.partition(":")[0].lower() not in _TYPES:
        return found
    message = f"`{name}` is a device that a step is traced for, and times are worked out from a device profile"
    help = "a snapshot says itself what it was traced for; name what the step is to run on, as in `--device h100-sxm`"
    return diagnose(TRACED_FOR, message, help=f"{help}: {found.help}" if found.help else help)
