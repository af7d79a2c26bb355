"""APL25x: the options that a policy is compiled under."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL250",
        "option of the backend",
        '`torch.compile(model, backend="policylang", options={…})` takes `policy` (the path of a policy file, which '
        "has to be there), `inner` (`inductor` or `aot_eager`), `root` (the path of a module that is compiled on its "
        "own), and any setting of Inductor. Something else was given, or something of another type.",
    ),
)
