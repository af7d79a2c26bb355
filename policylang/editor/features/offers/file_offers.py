"""Bundled policies and device profiles, and the files beside a policy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from policylang.editor.features.offers.items import Kind, WordOffer
from policylang.language.cursor import Cursor
from policylang.language.devices.reading import SUFFIX as DEVICE_SUFFIX
from policylang.language.devices.reading import bundled_devices
from policylang.language.files import SUFFIX, bundled_names
from policylang.language.loader import PRELUDE
from policylang.language.resources import devices_folder, policies_folder

_MOST_ENTRIES = 2000


def include_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled policies, and policy files beside this one."""
    if not cursor.typed.startswith('"'):
        for name in bundled_names():
            if name != PRELUDE:  # it is always there
                detail = first_sentence(comment_of(policies_folder() / f"{name}{SUFFIX}"))
                yield WordOffer(f"<{name}>", Kind.File, detail, about=f"bundled:{name}")
    if not cursor.typed.startswith("<"):
        yield from _beside(path, cursor, SUFFIX)


def device_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled profiles, and files beside this policy."""
    if not cursor.typed.startswith('"'):
        for name in bundled_devices():
            detail = first_sentence(comment_of(devices_folder() / f"{name}{DEVICE_SUFFIX}"))
            yield WordOffer(name, Kind.File, detail, about=f"device:{name}")
    if cursor.typed.startswith('"') or not cursor.typed:
        yield from _beside(path, cursor, DEVICE_SUFFIX)


@cache
def comment_of(file: Path) -> str:
    """The comment that a bundled file starts with, without its marks; empty where there is none."""
    lines: list[str] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.removeprefix("#").strip())
    except (OSError, UnicodeDecodeError):
        return ""
    return "\n".join(lines)


def first_sentence(comment: str) -> str:
    """Of the first paragraph."""
    text = " ".join(comment.partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _beside(path: Path | None, cursor: Cursor, suffix: str) -> Iterator[WordOffer]:
    """Files and folders, as they are named from the policy's own; none of a text that is in no file."""
    if path is None:
        return
    typed = cursor.typed.removeprefix('"')
    folder, slash, _ = typed.rpartition("/")
    before = f"{folder}{slash}"
    mine = path.resolve()
    try:
        with os.scandir(path.parent / before) as entries:
            found = sorted((each.name, each.is_dir()) for each, _ in zip(entries, range(_MOST_ENTRIES), strict=False))
    except (OSError, ValueError):
        return
    for name, is_folder in found:
        if name.startswith(".") or '"' in name:
            continue
        if not is_folder and name.endswith(suffix) and (path.parent / before / name).resolve() != mine:
            yield WordOffer(f'"{before}{name}"', Kind.File)
    for name, is_folder in found:
        if is_folder and not name.startswith(".") and '"' not in name:
            yield WordOffer(f'"{before}{name}/', Kind.Folder)  # the quote comes with the file
