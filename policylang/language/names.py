"""Resolves selectors: looks up their names, gives figures their dimension, checks globs and versions."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field

from policylang.language.diagnostics import Diagnostic, DiagnosticList, Related, Span, removed
from policylang.language.globs import name_glob_problem
from policylang.language.operators import PLAIN_FUNCTIONS, OperatorTable, group_names, prelude_group, split_operator
from policylang.language.predicates import check_path_glob, fit_predicate
from policylang.language.public_names import MODULES, as_one, python_name, shown_forms, usual_forms
from policylang.language.selectors import union_of
from policylang.language.shown import did_you_mean, nearest
from policylang.language.syntax import InModule, Let, Operator, Reference, Selector, Union, Where, Word
from policylang.language.walk import rebuild

_THE_REST = frozenset(("default", "otherwise", "rest", "fallback", "others", "remaining", "undecided"))
_COLLECTIVES = frozenset(("communication", "communications", "comm", "comms", "collectives", "nccl", "network"))
_REGISTERED = (
    "a custom operator is known from a graph that calls it, `--graph`, or once its module is imported, `--import`"
)
_MAX_SUGGESTIONS = 50
"""Unknown words of one policy that get a did-you-mean: it costs milliseconds each."""


@define
class Definitions:
    """Resolves the names of one policy, statement by statement."""

    operators: OperatorTable
    later: dict[str, Span]
    """The first definition of each name."""
    lets: dict[str, Let] = field(factory=dict)
    """The resolved names so far, and the groups that were used."""
    diagnostics: DiagnosticList = field(factory=DiagnosticList)
    _mine: dict[str, Let] = field(factory=dict)
    _used: set[str] = field(factory=set)
    _known: dict[str, tuple[Operator | None, tuple[Diagnostic, ...]]] = field(factory=dict)
    """The operator of each word looked up so far, and its problems."""
    _suggestions: int = 0

    def define(self, let: Let, bundled: bool) -> None:
        """Take a ``let`` up; from here on its name is known."""
        earlier = self._mine.get(let.name)
        if earlier is not None:
            if earlier.span != let.span:  # else the same line, of a file that is included twice
                related = (Related("defined here before", earlier.span),)
                message, fixes = f"the name `{let.name}` is defined twice", [removed(let.span)]
                self.diagnostics.report("APL107", message, _name_span(let), related=related, fixes=fixes)
            return
        found = len(self.diagnostics)
        resolved = evolve(let, selector=self.resolve(let.selector, defining=let.name))
        self._mine[let.name] = let
        if bundled:
            self._used.add(let.name)
        elif len(self.diagnostics) == found:
            hidden, help = "group", "choose another name, unless that is what you want"
            if let.name not in group_names():
                help = f"choose another name; the operator is written with its namespace, `aten.{let.name}`"
                hidden = "operator" if self._is_operator(let.name) else ""
            if hidden:
                message = f"the name `{let.name}` hides the {hidden} of that name"
                self.diagnostics.report("APL111", message, _name_span(let), help=help)
        self.lets[let.name] = resolved

    def resolve(self, selector: Selector, *, defining: str | None = None) -> Selector:
        """The selector with its words looked up and its globs and figures checked."""

        def change(part: Selector) -> Selector:
            if isinstance(part, Word):
                return self._look_up(part, defining)
            if isinstance(part, InModule):
                check_path_glob(part.glob, part.span, self.diagnostics.append)
            elif isinstance(part, Where):
                return evolve(part, predicate=fit_predicate(part.predicate, self.diagnostics.append))
            elif isinstance(part, Union):
                return union_of(part.parts, part.span)
            return part

        return rebuild(selector, change)

    def finish(self, *, library: bool) -> list[Diagnostic]:
        """All problems. Unused names are among them, unless this is a library of names for others."""
        for name, let in self._mine.items():
            if name not in self._used and not library:
                message, fixes = f"the name `{name}` is never used", [removed(let.span)]
                self.diagnostics.report("APL110", message, _name_span(let), fixes=fixes)
        return self.diagnostics

    def _look_up(self, word: Word, defining: str | None) -> Selector:
        text = word.text
        if text == defining:
            help = f"an operator of that name is written `aten.{text}`"
            write = [f"aten.{text}"] if self._is_known(f"aten.{text}") else []
            message = f"the name `{text}` is defined by itself"
            self.diagnostics.report("APL108", message, word.span, help=help, write=write)
            return word
        if text in self._mine:
            self._used.add(text)
            return Reference(text, span=word.span)
        if text in self.later:
            self._used.add(text)
            message = f"the name `{text}` is used before it is defined"
            related = Related("defined here", self.later[text])
            self.diagnostics.report("APL109", message, word.span, related=(related,))
            return word
        let = prelude_group(text)
        if let is not None:
            self.lets.setdefault(text, let)
            return Reference(text, span=word.span)
        return self._operator(word)

    def _operator(self, word: Word) -> Selector:
        if word.text not in self._known:
            before = len(self.diagnostics)
            operator = self._find_operator(word)
            self._known[word.text] = operator, tuple(self.diagnostics[before:])
        else:
            operator, wrong = self._known[word.text]
            self.diagnostics.extend(each.moved_to(word.span) for each in wrong)
        return word if operator is None else evolve(operator, span=word.span)

    def _find_operator(self, word: Word) -> Operator | None:
        text = word.text
        if (meant := self._meant_by(text)) is not None:
            message = f"`{text}` is not the name of an operator"
            self.diagnostics.report("APL101", message, word.span, help=meant[0], write=[meant[1]])
            return None
        if problem := name_glob_problem(text):
            self.diagnostics.report("APL112", f"the name `{text}` {problem}", word.span)
            return None
        operator = split_operator(text, self.operators.has_namespace)
        parts = text.split(".")
        if operator is None or not all(parts) or any(part.isdecimal() for part in parts):
            help = "an operator is written as `mm`, `aten.mm` or `aten.mm.default`; a module path follows `in`"
            self.diagnostics.report("APL101", f"`{text}` is not the name of an operator", word.span, help=help)
            return None
        found = self.operators.matches(operator.namespace, operator.name, operator.overload)
        if found:
            plain = all(name.startswith(f"{PLAIN_FUNCTIONS}.") for name in found)
            return evolve(operator, namespace=PLAIN_FUNCTIONS) if plain else operator
        return self._unknown(word, operator)

    def _meant_by(self, text: str) -> tuple[str, str] | None:
        """The help for foreign spellings (``aten::mm``, ``torch.mm``, ``nn.Linear``, ``[mm, bmm]``), and the
        replacement."""
        if text.startswith("[") and text.endswith("]"):
            inner = text[1:-1].strip()
            return f"write `{inner}`: selectors are joined without brackets", f"({inner})"
        plain = text.replace("::", ".").removeprefix("torch.ops.").removesuffix(".")
        if plain != text and "." not in plain.partition(".")[2].partition(".")[2]:
            return (f"write `{plain}`", plain) if self._is_known(plain) else None
        name = python_name(text)
        if name is None or self._is_known(text):
            return None
        traced = usual_forms(name)
        if traced:
            return f"write `{', '.join(traced)}`, which it is traced as", as_one(traced)
        return (f"write `{name}`", name) if self._is_known(name) else None

    def _is_known(self, text: str) -> bool:
        part = None if name_glob_problem(text) else split_operator(text, self.operators.has_namespace)
        return part is not None and bool(self.operators.matches(part.namespace, part.name, part.overload))

    def _unknown(self, word: Word, operator: Operator) -> Operator | None:
        parts = word.text.split(".")
        namespace = parts[0] if len(parts) > 1 else None
        only_met = namespace is not None and self.operators.is_only_met(namespace)
        listed = namespace is not None and self.operators.has_namespace(namespace)
        known = namespace is None or (not only_met and (self.operators.complete or listed))
        if not known and (operator.namespace is not None or not self._is_operator(parts[0])):
            message = f"no operator of the namespace `{namespace}` is known here; it is checked when applied"
            fix = f"a module path follows `in`: `everything in {word.text}`; {_REGISTERED}"
            if only_met:
                message = f"the graph does not call `{word.text}`, and others of its namespace are not known here"
                fix = _REGISTERED
            near = self._nearest(word.text)
            self.diagnostics.report("APL102", message, word.span, help=did_you_mean(near) or fix, write=near)
            return split_operator(word.text, lambda _: True) or operator
        kind = "operator" if namespace is not None else "operator, group or name"
        help, write = self._elsewhere(word.text)
        if help is None:
            write = self._nearest(word.text)
            help = did_you_mean(write)
        if help is None and namespace is not None and not listed and not self._is_operator(namespace):
            help = _REGISTERED
        self.diagnostics.report("APL101", f"there is no {kind} `{word.text}`", word.span, help=help, write=write)
        return None

    def _elsewhere(self, text: str) -> tuple[str | None, Sequence[str]]:
        """The help for a name that people use, and that no operator has, and its replacements."""
        if text in _COLLECTIVES:
            help = "write `collective` for all of them, or one of `all_gather`, `reduce_scatter`, `all_reduce`"
            return help, ("collective", "all_gather", "reduce_scatter", "all_reduce")
        if text in _THE_REST:
            return "what no rule matches is `undecided`: write `undecided -> save`", ()
        traced = usual_forms(text)
        if traced:
            return f"it is traced as {shown_forms(traced)}: write `{', '.join(traced)}`", (as_one(traced),)
        if text in ("layer", "layers"):
            return "the layers of a model are its blocks: `everything in block`, `everything in every 2nd block`", ()
        if text in MODULES:
            return f"a module path follows `in`: `everything in {text}`", (f"everything in {text}",)
        return None, ()

    def _is_operator(self, name: str) -> bool:
        return bool(self.operators.matches(None, name, None))

    def _nearest(self, text: str) -> tuple[str, ...]:
        self._suggestions += 1
        if self._suggestions > _MAX_SUGGESTIONS:
            return ()
        own = nearest(text, ["everything", *self._mine, *group_names()], limit=2) if "." not in text else ()
        return tuple(dict.fromkeys((*own, *self.operators.nearest(text))))[:3]


def _name_span(let: Let) -> Span:
    """The name in ``let NAME = …``."""
    start = let.span.text.find(let.name, len("let"))
    return Span(let.span.source, let.span.start + start, let.span.start + start + len(let.name))
