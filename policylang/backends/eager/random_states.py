"""The state that a generator was in, for an operator that is to draw the same numbers again.

A checkpoint puts the generators back once, before the recomputation begins. That is not enough where an operator that
draws is saved: it does not run again, so the next one would draw its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen

from policylang.torch_compat.eager import default_generator


@frozen(eq=False)
class GeneratorState:
    """The generator that a call draws from and the state it is in; None where its device has no generator."""

    generator: torch.Generator | None
    state: torch.Tensor | None

    @classmethod
    def before(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GeneratorState:
        """The generator is the one that the call is given, else that of its device."""
        generator: torch.Generator | None = kwargs.get("generator")
        if generator is None:
            device = kwargs.get("device")
            if device is None:
                device = next((value.device for value in args if isinstance(value, torch.Tensor)), "cpu")
            generator = default_generator(torch.device(device))
        return cls(generator, None if generator is None else generator.get_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Under it the generator draws what it drew then; afterwards it goes on as if it had not."""
        if self.generator is None or self.state is None:
            yield
            return
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)
