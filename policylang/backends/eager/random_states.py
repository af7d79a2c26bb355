"""The state that a generator was in, for an operator that is to draw the same numbers again.

A checkpoint puts the generators back once, before the recomputation begins. That is not enough where an operator that
draws is saved: it does not run again, so the next one would draw its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen

from policylang.torch_compat.eager import default_generator


@frozen(eq=False)
class GeneratorState:
    """A generator and the state it was in."""

    generator: torch.Generator
    state: torch.Tensor

    @classmethod
    def now(cls, generator: torch.Generator) -> GeneratorState:
        return cls(generator, generator.get_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Under it the generator draws what it drew then; afterwards it goes on as if it had not."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)


def generator_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a call draws from: the one it was given, else that of its device."""
    given: torch.Generator | None = kwargs.get("generator")
    if given is not None:
        return given
    device = kwargs.get("device")
    if device is None:
        device = next((value.device for value in args if isinstance(value, torch.Tensor)), torch.device("cpu"))
    return default_generator(torch.device(device))
