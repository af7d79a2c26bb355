"""Reading and writing policy files, and finding those that another one includes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.resources import policies_folder
from policylang.language.shown import did_you_mean, nearest

MAX_FILE = 4 * 1024 * 1024
SUFFIX = ".apl"
ENDS = f"the name of a policy file ends in `{SUFFIX}`"
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


@frozen
class BundledPolicy:
    name: str
    """The name that commands and ``policylang.load`` take."""
    description: str
    """One sentence, from the comment with which its file begins."""
    file: Path


def bundled_policies() -> tuple[BundledPolicy, ...]:
    """The policies of the library, by name."""
    found = []
    for name in bundled_names():
        file = bundled_file(name)
        if file is not None and name != "prelude":  # of groups, and no policy
            found.append(BundledPolicy(name, description_of(file.read_text(encoding="utf-8")), file))
    return tuple(found)


def description_of(text: str) -> str:
    """The first paragraph of the comment with which a policy begins, on one line and without its full stop."""
    said = []
    for line in text.splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        said.append(line.lstrip("#").strip())
    return " ".join(said).removesuffix(".")


def read_source(path: Path, name: str) -> Source | Diagnostic:
    """The text of a file under the name that reports will give it, or why it cannot be read."""
    if not name or not os.path.exists(path):
        return _missing(path, name)
    content = read_limited(path, name, MAX_FILE, "APL104", "name a policy file")
    if isinstance(content, Diagnostic):
        return content
    if path.suffix == SUFFIX and path.resolve().suffix != SUFFIX:  # a stranger's may lead to any file of ours
        return diagnose("APL104", f"`{name}` is a link to a file that is no policy", help=ENDS)
    return source_of(content, name, path.stat().st_size)


def read_limited(path: Path, name: str, most: int, code: str, help: str) -> bytes | Diagnostic:
    """The content of a regular file, and one byte more than ``most`` of a larger one; or why there is none."""
    try:
        if os.path.isdir(path):
            return diagnose(code, f"`{name}` is a folder", help=help)
        if os.path.exists(path) and not path.is_file():
            return diagnose(code, f"`{name}` is not a regular file", help=help)
        with path.open("rb") as stream:
            return stream.read(most + 1)
    except (OSError, ValueError) as error:
        return diagnose(code, f"`{name}` cannot be read: {reason_of(error)}")


def source_of(content: bytes, name: str, size: int | None = None) -> Source | Diagnostic:
    """The text that some bytes are, or why they are none. ``size``: of the whole file, where that is not all of it."""
    if len(content) > MAX_FILE:
        size = len(content) if size is None else size
        message = f"the file holds {size / 1024 / 1024:.1f} MiB, more than the 4 MiB a policy may have"
        return diagnose("APL002", message, Span(Source(name, ""), 0, 0))
    return decoded(content, name, "APL001", "a policy")


def decoded(content: bytes, name: str, code: str, noun: str) -> Source | Diagnostic:
    """The text that some bytes are. ``noun``: what the file should be."""
    try:
        return Source(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"the file is not text: byte 0x{content[error.start]:02x} in line {line} is not UTF-8"
        return diagnose(code, message, Span(Source(name, ""), 0, 0), help=f"{noun} is a UTF-8 text file")


def reason_of(error: Exception) -> str:
    """Why a file cannot be read or written, as the end of a sentence."""
    return ((isinstance(error, OSError) and error.strerror) or str(error)).lower()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old one or the new one, never a part of one. A file that is replaced
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
    """The policy files of a path, in order: all below a folder. An empty folder is returned itself, to be reported."""
    if not os.path.isdir(path):  # nor is the empty path, which `Path` takes for the current folder
        return [path]
    return sorted(str(file) for file in Path(path).rglob(f"*{SUFFIX}") if file.is_file()) or [path]


def find_policy(path: str) -> tuple[Path, str]:
    """The file that a user means, and its name for reports: the user's file, else a bundled policy of that name."""
    bundled = bundled_file(path) if os.path.basename(path) == path and not os.path.exists(path) else None
    return (Path(path), path) if bundled is None else (bundled, f"<{bundled.stem}>")


def _missing(path: Path, name: str) -> Diagnostic:
    line = name.partition("\n")[0][:_MOST_OF_A_NAME]
    message = f"there is no policy file `{name if line == name else f'{line}…'}`"
    if _is_bundled_name(path, name):
        bundled = f"the bundled policy of that name is written `<{path.name.removesuffix(SUFFIX)}>`"
        return diagnose("APL103", message, help=bundled)
    near = nearest(path.name, sorted({*_beside(path), *(f"{each}{SUFFIX}" for each in bundled_names())}))
    if path.suffix != SUFFIX and path.name == str(path):  # a bundled policy goes by its bare name, misspelt too
        mine = [each for each in near if (path.parent / each).exists()]
        near = (*nearest(path.name, bundled_names()), *mine)[:3]
    help = did_you_mean(near)
    if help is None and any(mark in name for mark in (" ", "\n", ";")):
        help = "`policylang.parse` takes the text of a policy"
    return diagnose("APL103", message, help=help)


def meant_files(path: Path, name: str) -> tuple[str, ...]:
    """Names that an include of a missing file may have meant: files beside it, and ``<name>`` of bundled policies."""
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
        return [entry.name for entry in path.parent.iterdir() if entry.suffix == SUFFIX and entry.exists()]
    except OSError:
        return []
