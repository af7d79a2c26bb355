"""What ``str()`` of an error or a report says: data knows no renderer, renderers enter themselves here.

``policylang.report`` enters its own when it is imported, which importing any module of policylang does.
"""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def as_text(value: object) -> str:
    """A value as a person reads it in a terminal, without a line end. Raises ``TypeError`` where nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as text")


@singledispatch
def as_html(value: object) -> str:
    """A value as a cell of a notebook shows it. Raises ``TypeError`` where nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as HTML")


@singledispatch
def as_page(value: object) -> str:
    """A value as an HTML page of its own. Raises ``TypeError`` where nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as a page")
