"""The version of the installed package."""

from __future__ import annotations


def installed_version() -> str:
    """As the package's metadata has it; ``(not installed)`` where there is none."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and seldom asked for

    try:
        return version("policylang")
    except PackageNotFoundError:
        return "(not installed)"
