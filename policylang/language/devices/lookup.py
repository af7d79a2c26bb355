"""Which profile a name means: one of the library, or a file.

A bare word is one of the library's, in full or as far as a dash; what has a slash or ends in ``.toml`` is a file. So
neither ever stands for the other, whatever lies in the current folder. A bare word that the library does not have may
be the name of a file.
"""

from __future__ import annotations

import os
from pathlib import Path

from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.resources import devices_folder
from policylang.language.wording import did_you_mean, nearest, shortened

SUFFIX = ".toml"
_LONGEST = 200


def bundled_devices() -> tuple[str, ...]:
    """The names of the profiles that come along."""
    try:
        return tuple(sorted(entry.stem for entry in devices_folder().iterdir() if entry.suffix == SUFFIX))
    except OSError:
        return ()


def find_device(name: str, base: Path) -> tuple[Path, str] | Diagnostic:
    """The file of a profile, and its name for reports."""
    if not name:
        return diagnose("APL152", "the name of a device profile is empty", help=_library())
    if os.path.basename(name) == name and not name.endswith(SUFFIX):
        word = name.lower()
        fitting = [each for each in bundled_devices() if each == word or each.startswith(f"{word}-")]
        if word in fitting or len(fitting) == 1:
            found = word if word in fitting else fitting[0]
            return devices_folder() / f"{found}{SUFFIX}", f"<{found}>"
        if fitting:
            quoted = " and ".join(f"`{each}`" for each in fitting)
            return diagnose("APL152", f"`{name}` is the beginning of several device profiles: {quoted}")
    path = base / name
    try:
        missing = not os.path.exists(path)
    except ValueError:
        missing = True
    return _unknown(name) if missing else (path, name)


def meant_devices(name: str) -> tuple[str, ...]:
    """The profiles that come along that a name may have been meant for: those that it begins, else those like it."""
    stem = os.path.basename(name).removesuffix(SUFFIX).lower()
    fitting = tuple(each for each in bundled_devices() if each == stem or each.startswith(f"{stem}-"))
    return fitting or _nearest(stem) if stem else ()


def _unknown(name: str) -> Diagnostic:
    shown = shortened(name.partition("\n")[0], _LONGEST)
    stem = os.path.basename(name).removesuffix(SUFFIX).lower()
    if stem in bundled_devices():
        help = f"the bundled profile of that name is written `{stem}`"
        return diagnose("APL152", f"there is no device profile `{shown}`", help=help)
    near = did_you_mean(_nearest(stem))
    help = f"{near} {_library()}" if near else _library()
    return diagnose("APL152", f"there is no device profile `{shown}`", help=help)


def _nearest(word: str) -> tuple[str, ...]:
    """By the whole name, or by the beginnings that also stand for it: ``h10`` is near to ``h100``."""
    beginnings: dict[str, str] = {}
    for name in bundled_devices():
        parts = name.split("-")
        for length in range(1, len(parts) + 1):
            beginnings.setdefault("-".join(parts[:length]), name)
    return tuple(dict.fromkeys(beginnings[each] for each in nearest(word, beginnings)))[:2]


def _library() -> str:
    return f"bundled are {', '.join(bundled_devices())}; a file is given by its path"
