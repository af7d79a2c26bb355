"""Warns where the kernels of a graph are not those of the device that the step trains on."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.graph.facts import Facts, InputKind, Phase
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.shown import counted

OTHER_KERNELS = "APL319"
ATTENTION_IN_MATMULS = "APL320"

WRITTEN_OUT = "aten._safe_softmax.default"
"""The softmax of an attention that no fused kernel of the device takes; nothing else calls it."""
_FUSED = ("aten._scaled_dot_product_", "aten._flash_attention_forward", "higher_order.flex_")
_CELLS = ("aten._thnn_fused_lstm_cell.", "aten._thnn_fused_gru_cell.")
_FIX = 'trace the step for the device that it trains on: `policylang snapshot … --device cuda`, or `device="cuda"`'


def kernel_findings(facts: Facts) -> Iterator[Diagnostic]:
    """A warning where the graph was traced on ``meta``, which has other kernels than any device, or where a GPU runs
    another one; a note where it was traced on a CPU whose attention is written out in matmuls."""
    kinds = traced_on(facts)
    attention = len(facts.by_target.get(WRITTEN_OUT, ()))
    if "meta" in kinds:
        message = "the graph was traced on `meta`, and holds other kernels than the device that the step trains on"
        details = (_written_out(attention),) if attention else ()
        yield diagnose(OTHER_KERNELS, message, help=_FIX, details=details)
    elif kinds == {"cpu"} and attention:
        message = f"{_written_out(attention)}, as the CPU runs it"
        yield diagnose(ATTENTION_IN_MATMULS, message, help=f"where it trains on a GPU, {_FIX}")
    cells = sum(len(rows) for target, rows in facts.by_target.items() if target.startswith(_CELLS))
    if cells and "cuda" in kinds:
        message = f"a recurrent layer was traced as {counted(cells, 'cell')}, which cuDNN runs as one kernel"
        yield diagnose(OTHER_KERNELS, message, help="figures of these layers are not those of the GPU")


def traced_on(facts: Facts) -> set[str]:
    """The types of the devices of the parameters, or of all inputs of a graph that has none."""
    inputs = [row for row in range(len(facts)) if facts.phases[row] == Phase.INPUT and facts.devices[row]]
    parameters = [row for row in inputs if facts.input_kinds[row] == InputKind.PARAMETER]
    return {facts.devices[row].partition(":")[0] for row in parameters or inputs}


def attention_kernels(facts: Facts) -> dict[str, int]:
    """The operators that attention runs in the forward, and how often."""
    return {
        target: len(rows)
        for target, rows in sorted(facts.by_target.items())
        if (target.startswith(_FUSED) and "backward" not in target) or target == WRITTEN_OUT
    }


def _written_out(count: int) -> str:
    return f"{counted(count, 'attention')} {'is' if count == 1 else 'are'} written out in bmm and softmax"
