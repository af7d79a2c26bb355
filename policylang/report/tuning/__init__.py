"""What tuning found, as text, JSON, a picture and a page.

How a notebook shows it is entered here, and ``policylang.tune`` imports this: nothing else makes what is shown.
"""

from __future__ import annotations

from policylang.language.shown import as_html
from policylang.tuning.tuned_policy import TunedPolicy


def _trade_off(found: TunedPolicy) -> str:
    from policylang.report.tuning.page import trade_off_cell

    return trade_off_cell(found)


as_html.register(TunedPolicy, _trade_off)
