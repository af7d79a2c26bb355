"""Reading and writing policy files, and finding those that another one includes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.lexer import MAX_FILE
from policylang.language.resources import policies_folder
from policylang.language.shown import did_you_mean, nearest

SUFFIX = ".apl"
ENDS = f"the name of a policy file ends in `{SUFFIX}`"
_OF_A_TEXT = (" ", "\n", ";")
_MOST_OF_A_NAME = 200


def bundled_names() -> tuple[str, ...]:
    """The policies of the bundled library, without their suffix."""
    try:
        return tuple(sorted(entry.stem for entry in policies_folder().iterdir() if entry.suffix == SUFFIX))
    except OSError:
        return ()


def bundled_file(name: str) -> Path | None:
    """The file of a bundled policy, ``llama3_sac`` or ``llama3_sac.apl``; None where the library has none such."""
    stem = name.removesuffix(SUFFIX)
    return policies_folder() / f"{stem}{SUFFIX}" if stem in bundled_names() else None


def read_source(path: Path, name: str) -> Source | Diagnostic:
    """The text of a file under the name that reports will give it, or why it cannot be read."""
    try:
        if not name:
            return _missing(path, name)
        if os.path.isdir(path):
            return diagnose("APL104", f"`{name}` is a folder", help="name a policy file")
        if not os.path.exists(path):
            return _missing(path, name)
        if not path.is_file():
            return diagnose("APL104", f"`{name}` is not a regular file", help="name a policy file")
        if path.suffix == SUFFIX and path.resolve().suffix != SUFFIX:  # a stranger's may lead to any file of ours
            return diagnose("APL104", f"`{name}` is a link to a file that is no policy", help=ENDS)
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE + 1)
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        return diagnose("APL104", f"`{name}` cannot be read: {reason_of(error)}")
    return source_of(content, name, size)


def source_of(content: bytes, name: str, size: int | None = None) -> Source | Diagnostic:
    """The text that some bytes are, or why they are none. ``size``: of the whole file, where that is not all of it."""
    if len(content) > MAX_FILE:
        size = len(content) if size is None else size
        message = f"the file holds {size / 1024 / 1024:.1f} MiB, more than the 4 MiB a policy may have"
        return diagnose("APL002", message, _start(name))
    try:
        return Source(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"the file is not text: byte 0x{content[error.start]:02x} in line {line} is not UTF-8"
        return diagnose("APL001", message, _start(name), help="a policy is a UTF-8 text file")


def reason_of(error: Exception) -> str:
    """Why a file cannot be read or written, as the end of a sentence."""
    return ((isinstance(error, OSError) and error.strerror) or str(error)).lower()


def write_whole(path: Path, content: bytes) -> None:
    """Put a file there in one step: readers see the old one or the new one, never half of one. A file that is replaced
    keeps its permissions, and a link stays a link. Raises ``OSError`` where it cannot be written."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # a pipe or a terminal; of a folder Python says what it is
        return
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as stream:
            stream.write(content)
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o7777)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def policy_files(path: str) -> list[str]:
    """The files a path stands for, in order: of a folder every policy file below it, else the path itself. An empty
    folder is returned itself, so that it is reported."""
    if not os.path.isdir(path):  # nor is the empty path, which `Path` takes for the current folder
        return [path]
    found = sorted(str(file) for file in Path(path).rglob(f"*{SUFFIX}") if file.is_file())
    return found or [path]


def find_policy(path: str) -> tuple[Path, str]:
    """The file that a user means, and its name for reports: his own file, else a bundled policy of that name."""
    file = Path(path)
    if os.path.basename(path) == path and not os.path.exists(path):
        bundled = bundled_file(path)
        if bundled is not None:
            return bundled, f"<{bundled.stem}>"
    return file, path


def _missing(path: Path, name: str) -> Diagnostic:
    message = f"there is no policy file `{_shortened(name)}`"
    if _is_bundled_name(path, name):
        bundled = f"the bundled policy of that name is written `<{path.name.removesuffix(SUFFIX)}>`"
        return diagnose("APL103", message, help=bundled)
    near = nearest(path.name, sorted({*_beside(path), *(f"{each}{SUFFIX}" for each in bundled_names())}))
    help = did_you_mean(_bundled_first(path, near))
    if help is None and any(mark in name for mark in _OF_A_TEXT):
        help = "`policylang.parse` takes the text of a policy"
    return diagnose("APL103", message, help=help)


def meant_files(path: Path, name: str) -> tuple[str, ...]:
    """Names that an include of a missing file may have meant: files beside it, and ``<name>`` for policies that
    come along; none where there is such a file."""
    if os.path.exists(path):  # a name that is too long is no file's
        return ()
    if _is_bundled_name(path, name):
        return (f"<{path.name.removesuffix(SUFFIX)}>",)
    beside = _beside(path)
    bundled = {f"{each}{SUFFIX}": f"<{each}>" for each in bundled_names() if f"{each}{SUFFIX}" not in beside}
    return tuple(bundled.get(near, near) for near in nearest(path.name, sorted((*beside, *bundled))))


def _is_bundled_name(path: Path, name: str) -> bool:
    return path.name.removesuffix(SUFFIX) in bundled_names() and os.path.basename(name) == name


def _beside(path: Path) -> list[str]:
    """The policy files in the folder of a path."""
    try:
        return [entry.name for entry in path.parent.iterdir() if entry.suffix == SUFFIX]
    except OSError:
        return []


def _bundled_first(path: Path, near: tuple[str, ...]) -> tuple[str, ...]:
    """Bundled policies are called by their bare names, also where a name is misspelt that could be a file's."""
    if path.suffix == SUFFIX or path.name != str(path):
        return near
    mine = [name for name in near if (path.parent / name).exists()]
    return (*nearest(path.name, bundled_names()), *mine)[:3]


def _shortened(name: str) -> str:
    line = name.partition("\n")[0][:_MOST_OF_A_NAME]
    return name if line == name else f"{line}…"


def _start(name: str) -> Span:
    return Span(Source(name, ""), 0, 0)
