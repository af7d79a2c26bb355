"""Compares the paths under one policy on one model: what each saves, recomputes and computes.

``running`` takes one step on each path, ``numbers`` compares what the steps computed, ``values`` what was decided and
kept, value by value, ``agree`` puts it together and ``table`` renders it. What counts as agreement is said in
``docs/agree.md``.
"""

from __future__ import annotations

from policylang.language.wording import as_text
from policylang.testing.path_comparison.results import Agreement
from policylang.testing.path_comparison.table import agreement_text

as_text.register(Agreement, agreement_text)
