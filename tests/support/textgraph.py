"""Graphs written as text, in the form of policy tests (``docs/policy-tests.md``), for tests of what happens after the
facts have been gathered."""

from typing import Any

from policylang.graph import textual
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source
from policylang.report.diagnostics import render_text

__all__ = ["CHAIN", "GraphBuilder", "facts_of"]

CHAIN = """
    %x = input bytes=10
    %a = aten.sin.default(%x) bytes=100
    %b = aten.sin.default(%a) bytes=100
    %c = aten.sin.default(%b) bytes=100
    %loss = aten.sum.default(%c) bytes=1
    ---
    %t = tangent bytes=1
    %dc = aten.mul.Tensor(%t, %c) bytes=100
    %db = aten.mul.Tensor(%dc, %b) bytes=100
    %da = aten.mul.Tensor(%db, %a) bytes=100
    output(%loss, %da)
"""
"""Three values, each made of the one before, and each read by one node of the backward."""


def facts_of(text: str, kind: GraphKind | None = None) -> Facts:
    """The facts of a graph written as text. ``FEEDS_BACKWARD`` and ``FORWARD_OUTPUT`` are filled in."""
    facts, problems = read_graph(Source("graph", text), kind)
    assert facts is not None, render_text(problems)
    return facts


class GraphBuilder(textual.GraphBuilder):
    """A builder that takes shapes and regions as a graph's text has them: ``2x4``."""

    def add(self, name: str, target: str, inputs: tuple[int, ...], **more: Any) -> int:
        if isinstance(more.get("shape"), str):
            more["shape"] = tuple(map(int, more["shape"].split("x"))) if more["shape"] else None
        if isinstance(more.get("region"), str):
            more["region"] = int(more["region"])
        return super().add(name, target, inputs, **more)
