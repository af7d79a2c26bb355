"""HTML that is written element by element. All text is escaped: nothing of a policy or a graph becomes markup."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

_VOID = frozenset({"br", "circle", "line", "meta", "path"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: object) -> Markup:
    """``class_`` is ``class``, other underscores are hyphens; an attribute that is True has no value, one that is None
    or False is left out."""
    said = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{said}/>")
    return Markup(f"<{tag}{said}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Markup:
    """One after the other."""
    return Markup("".join(each if isinstance(each, Markup) else escape(each) for each in children))


def rows_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int], caption: str) -> Markup:
    """A table that scrolls by itself where the page is narrow."""
    kinds = ["number" if at in numbers else None for at in range(len(head))]
    heads = (element("th", name, scope="col", class_=kind) for name, kind in zip(head, kinds, strict=True))
    body = (
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    )
    parts = (element("caption", caption), element("thead", element("tr", *heads)), element("tbody", *body))
    return element("div", element("table", *parts), class_="scroll", tabindex="0", role="region", aria_label=caption)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
