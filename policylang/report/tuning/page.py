"""The trade-off as one page that needs nothing else, no script either: the picture, and the rules of every point."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from policylang.language.figures import counted, figure
from policylang.report.markup import Markup, element, joined
from policylang.report.plan.html import filled
from policylang.report.plan.sections import tile
from policylang.report.tuning.account import share_text
from policylang.report.tuning.rows import distinctions
from policylang.report.tuning.scatter import trade_off_svg
from policylang.tuning.evaluation import Candidate
from policylang.tuning.tuned_policy import TunedPolicy, bound_words, budget_words, memory_of, step_words


def trade_off_page(found: TunedPolicy, known: Sequence[tuple[str, Candidate]]) -> str:
    """The whole page. ``known`` are policies to compare with, by name. Without a text there was no budget."""
    tuned, subject, chosen = found.tuned, found.subject, bool(found.text)
    words = f"{budget_words(tuned.budget)} for {subject.called}" if chosen else f"memory and time of {subject.called}"
    about = [f"{subject.kind} graph of {counted(subject.nodes, 'node')}", subject.device]
    values = {
        "title": escape(words),
        "subtitle": escape(" · ".join([*about, f"facts {subject.fingerprint[:12]}"])),
        "tiles": _tiles(found) if chosen else "",
        "picture": trade_off_svg(tuned, known, budget=chosen, linked=True),
        "policy": _policy(found) if chosen else "",
        "points": joined(*_points(found, chosen)),
        "known": _known(found, known),
    }
    return filled("trade_off.html", values, {}, ())


def _tiles(found: TunedPolicy) -> Markup:
    tuned, chosen = found.tuned, found.tuned.chosen
    share = f"{share_text(chosen.recompute, tuned)} of the forward"
    at_peak = f"{figure(chosen.peak, 'bytes')} of the graph, at {chosen.peak_at or 'its beginning'}"
    return joined(
        tile("peak", figure(found.peak, "bytes"), at_peak),
        tile("saved for the backward", figure(chosen.saved, "bytes"), ""),
        tile("second runs", figure(chosen.recompute, "seconds"), share),
        tile("step", step_words(chosen), bound_words(tuned)),
    )


def _policy(found: TunedPolicy) -> Markup:
    return element(
        "section",
        element("h2", "The policy", id="text-title"),
        element("div", element("pre", found.text), class_="scroll"),
        aria_labelledby="text-title",
    )


def _points(found: TunedPolicy, chosen: bool) -> list[Markup]:
    tuned = found.tuned
    phrases = distinctions(tuned.table)
    return [
        _details(each, phrase, found, f"policy-{at}", is_open=chosen and each == tuned.chosen)
        for at, (each, phrase) in enumerate(zip(tuned.table, phrases, strict=True), 1)
    ]


def _known(found: TunedPolicy, known: Sequence[tuple[str, Candidate]]) -> Markup:
    if not known:
        return joined()
    hint = "What a policy leaves to PyTorch's partitioner counts as saved."
    return element(
        "section",
        element("h2", "The bundled policies that fit", id="known-title"),
        element("p", hint, class_="hint"),
        *(_details(each, name, found, "", is_open=False) for name, each in known),
        aria_labelledby="known-title",
    )


def _details(each: Candidate, phrase: str, found: TunedPolicy, name: str, *, is_open: bool) -> Markup:
    tuned = found.tuned
    size = figure(memory_of(each, tuned), "bytes")
    time = f", {figure(each.price, 'seconds')} ({share_text(each.price, tuned)})"
    summary = element(
        "summary",
        element("span", phrase, class_="label"),
        element("span", element("b", size), time, class_="amount"),
        element("span", f"{figure(each.saved, 'bytes')} saved, step {step_words(each)}", class_="amount"),
    )
    rules = element("div", element("pre", each.rules.strip()), class_="scroll")
    return element("details", summary, rules, class_="group", id=name or None, open=is_open or None)


def trade_off_cell(found: TunedPolicy) -> str:
    """The picture and the text, for the cell of a notebook."""
    return joined(trade_off_svg(found.tuned), element("pre", found.text))
