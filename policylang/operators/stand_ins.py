"""Operators that this torch does not have, as recorded graphs call them."""

from __future__ import annotations

from typing import Any, NoReturn

from attrs import frozen


@frozen
class StandIn:
    """What one call shows of such an operator: it reads its arguments and returns new tensors.

    A plain value in the place of an operator of torch's registry: that is the whole process's, so that what one file
    calls would decide what is read of the next.
    """

    namespace: str
    name: str
    overload: str
    positional: int
    """How many arguments the call gives by position."""
    keywords: tuple[str, ...]
    """The names of the others."""
    returns_several: bool

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}.{self.overload}"

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"`{self}` is an operator that this torch does not have")
