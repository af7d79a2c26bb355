"""Names and words of the language, held against the torch that is installed, and globs over names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import torch._inductor.inductor_prims
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen
from hypothesis import given
from hypothesis import strategies as st

from policylang.api.load import operators_at_hand
from policylang.commands.snapshot import import_save_ops
from policylang.graph.textual import read_graph
from policylang.language import lexer as lexer_module
from policylang.language import parser, syntax
from policylang.language.diagnostics import CODES, Source, is_error
from policylang.language.formatting import format_source
from policylang.language.globs import NameGlob, PathGlob, name_glob_problem, path_glob_problem
from policylang.language.lexer import TABLE as GRAMMAR_TABLE
from policylang.language.lexer import key, keywords, lexer, table_of, terminal_texts, word_pairs, words_of
from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable, group_names, prelude_group
from policylang.language.parser import parse_file
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
from policylang.language.resources import data_file, grammar_file, manifest
from policylang.language.selectors import parts
from policylang.language.shown import UNITS
from policylang.language.statements import ACTIONS
from policylang.language.syntax import Difference, Operator, Reference, Selector, Union
from policylang.language.words import Meaning, meaning, meanings, senses
from policylang.planning.capabilities import FLAT
from policylang.planning.planner import plan
from policylang.report.diagnostics import render_text
from policylang.testing.suites import run_files
from policylang.torch_compat.graphs import operator_facts, operator_names
from tests.language.test_forms import policy, selector, told

TABLE = OperatorTable.bundled()
FACTS = data_file("operator_facts.json")
same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != manifest().torch_version, reason="the manifest was made from another torch"
)


def names(selector: Selector) -> set[str]:
    """``namespace.name`` of the known operators that a group denotes."""
    if isinstance(selector, Operator):
        found = TABLE.matches(selector.namespace, selector.name, selector.overload)
        return {".".join(full.split(".")[:2]) for full in found}
    if isinstance(selector, Union):
        return set().union(*map(names, selector.parts))
    assert isinstance(selector, Difference)
    return names(selector.left) - names(selector.right)


def group(name: str) -> set[str]:
    found = prelude_group(name)
    return names(found.selector)


@same_torch
def test_the_manifest_holds_the_operators_of_its_torch() -> None:
    kept = {"aten", "prims", "_c10d_functional", "higher_order", "torch", "builtin", "torch_attn"}
    for full in operator_names():
        namespace, _, rest = full.partition(".")
        name, _, overload = rest.partition(".")
        if namespace in kept:
            assert TABLE.matches(namespace, name, overload or None), full


@same_torch
def test_the_facts_are_those_of_its_torch() -> None:
    assert json.loads(FACTS.read_text(encoding="utf-8"))["facts"] == operator_facts()


def test_the_library_has_the_groups_of_the_language() -> None:
    assert list(group_names()) == [
        *("matmul", "attention", "compute", "all_gather", "allgather", "reduce_scatter", "all_reduce", "all_to_all"),
        *("collective", "wait", "cast", "view", "random", "pointwise", "activation", "reduction", "norm"),
    ]


@pytest.mark.parametrize("name", group_names())
def test_every_word_of_a_group_means_something_here(name: str) -> None:
    found = prelude_group(name)
    pending: list[Selector] = [found.selector]
    while pending:
        part = pending.pop()
        if isinstance(part, Operator):
            assert names(part), part.text
        else:
            pending.extend(parts(part))
    assert policy(f"save {name}").lets == {name: found}


def test_attention_is_every_forward_form() -> None:
    found = group("attention")
    assert {
        "aten.scaled_dot_product_attention", "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward", "aten._efficient_attention_forward", "higher_order.flex_attention",
        "torch_attn._varlen_attn",
    } <= found  # fmt: skip
    assert not [name for name in found if "backward" in name]


def test_compute_is_pytorchs_own_list() -> None:
    assert group("compute") == set(operator_facts()["compute"]) | {"higher_order.flex_attention"}


def test_pointwise_reduction_view_and_random_are_what_torch_says() -> None:
    facts = operator_facts()
    assert group("reduction") - {"aten.max", "aten.min", "prims.sum", "prims.prod"} <= set(facts["reduction"])
    untagged = {"aten.hardswish", "aten.leaky_relu"}  # the second in 2.11
    assert group("pointwise") - set(facts["pointwise"]) <= untagged
    not_aliasing = {"aten._unsafe_view", "aten.detach", "aten.expand"}
    assert group("view") - set(facts["view"]) <= not_aliasing
    drawing = {"prims.inductor_random", "rngprims.philox_rand", "aten.uniform", "aten.random"}
    out_of_place = {name.removesuffix("_") for name in group("random")}  # the facts leave in-place forms out
    assert out_of_place - set(facts["random"]) <= drawing


def test_groups_that_share_nothing_do_not_overlap() -> None:
    assert not group("matmul") & group("pointwise")
    assert not group("attention") & group("matmul")
    assert not group("view") & group("pointwise")
    assert not group("wait") & group("collective")


def test_a_loaded_torch_is_asked_for_custom_operators() -> None:
    with torch.library._scoped_library("policylang_test", "DEF") as library:
        library.define("fused_mlp(Tensor x) -> Tensor")
        found = operators_at_hand().matches("policylang_test", "fused_mlp", None)
        assert found == ("policylang_test.fused_mlp.default",)
    assert not operators_at_hand().matches("policylang_test", "fused_mlp", None)


def test_nearest_names_have_as_many_parts_as_the_misspelt_one() -> None:
    assert "scaled_dot_product_attention" in TABLE.nearest("scaled_dot_product_atention")
    assert "aten.addmm" in TABLE.nearest("aten.admm")
    assert TABLE.nearest("aten.add.Tensr")[0] == "aten.add.Tensor"
    assert "_scaled_dot_product_flash_attention" in TABLE.nearest("dot_product_flash_attention")


def test_a_let_stands_for_its_selector() -> None:
    found = policy("let big = mm where bytes > 64 MiB\nlet early = big in first 2 blocks\nsave early")
    assert found.rules[0].selector == Reference("early")
    assert list(found.lets) == ["big", "early"]
    assert found.lets["early"].selector.selector == Reference("big")  # type: ignore[union-attr]


def test_an_unknown_namespace_is_left_to_when_it_is_applied() -> None:
    loaded = parse_policy("save mylib.fused_mlp, mylib.fused_mlp.default")
    assert [each.code for each in loaded.diagnostics] == ["APL102"] * 2
    assert loaded.diagnostics[0].message.endswith("it is checked when applied")
    assert loaded.policy.rules[0].selector.parts == (  # type: ignore[union-attr]
        Operator("mylib", "fused_mlp", None),
        Operator("mylib", "fused_mlp", "default"),
    )


def test_a_loaded_torch_is_asked_for_what_the_manifest_lacks() -> None:
    asked: list[str] = []

    def registry() -> list[str]:
        asked.append("once")
        return ["mylib.fused_mlp.default"]

    table = OperatorTable.bundled(more=registry)
    assert parse_policy("save mm, aten.bmm", operators=table).diagnostics == ()
    assert not asked, "the manifest knows these"
    assert parse_policy("save fused_mlp, mylib.fused_mlp", operators=table).diagnostics == ()
    assert asked == ["once"]
    (found,) = parse_policy("save mylib.fused_mpl", operators=table).diagnostics
    assert (found.code, found.help) == ("APL101", "did you mean `mylib.fused_mlp`?")
    (found,) = parse_policy("save otherlib.fused", operators=table).diagnostics
    assert found.code == "APL101", "a torch that is loaded knows every namespace there is"


def test_a_bare_name_reaches_python_functions_only_where_no_operator_has_it() -> None:
    assert selector("getitem") == Operator("builtin", "getitem", None)
    assert selector("add") == Operator(None, "add", None)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("let big = mm\nlet big = bmm\nsave big", "defined here before", 1),
        ("save big\nlet big = mm", "defined here", 2),
        ("blocks h.*\nblocks layers.*\nsave mm in block", "first written here", 1),
    ],
)
def test_related_places_are_shown(text: str, message: str, line: int) -> None:
    (found,) = parse_policy(text).diagnostics
    assert [(each.message, each.span and each.span.line) for each in found.related] == [(message, line)]


def test_a_let_that_hides_a_group_does_not_change_the_other_groups() -> None:
    loaded = parse_policy("let all_gather = mm\nsave collective, all_gather")
    assert loaded.policy.lets["collective"] == prelude_group("collective")


@pytest.mark.parametrize(
    ("text", "codes"),
    [("let a = b\nlet b = a\nsave b", ["APL109"]), ("let big = mm where bytes > 64 MiB", []), ("", ["APL207"])],
    ids=["mutual recursion", "a library of names", "no statement"],
)
def test_what_is_said_of_names_and_their_absence(text: str, codes: list[str]) -> None:
    assert [each.code for each in told(text)] == codes


@pytest.mark.parametrize(
    ("glob", "path", "outermost"),
    [
        ("layers.*", "layers.0", "layers.0"), ("layers.*", "model.layers.0.self_attn.q_proj", "model.layers.0"),
        ("layers.*", "layers", None), ("layers.*", "my_layers.0", None), ("/layers.*", "layers.3.wo", "layers.3"),
        ("/layers.*", "model.layers.3.wo", None), ("layers.*.attention", "layers.0.attention.wo", "layers.0.attention"),
        ("layers.*.attention", "layers.0.inner.attention.wo", None),
        ("layers.**.attention", "layers.0.inner.attention.wo", "layers.0.inner.attention"),
        ("layers.**.wo", "layers.wo", "layers.wo"), ("layers.**", "layers", None),
        ("layers.**", "layers.0.wo", "layers.0"), ("**", "a.b", "a"), ("**.wo", "a.b.wo.c", "a.b.wo"),
        ("/**.wo", "a.b.wo.c", "a.b.wo"), ("a.**.**.b", "a.x.b", "a.x.b"),
        ("layers.{0,1,31}", "layers.31.wo", "layers.31"), ("layers.{0, 1}", "layers.1", "layers.1"),
        ("layers.{0,1,31}", "layers.3", None), ("layers.[0-3]", "layers.2", "layers.2"),
        ("layers.[0-3]", "layers.4", None), ("layers.[0-3]", "layers.12", None),
        ("layers.[!0-3]", "layers.4", "layers.4"), ("layers.?", "layers.12", None),
        ("layers.1?", "layers.12", "layers.12"), ("h.*", "transformer.h.0.h.1", "transformer.h.0"),
        ("Layers.*", "layers.0", None), ("layers.*", "", None), ("*_proj", "layers.0.q_proj", "layers.0.q_proj"),
        ("*_proj", "layers.0.proj", None), ("a*b*c", "aXbYc", "aXbYc"), ("a*b*c", "acb", None), ("0", "0.1", "0"),
    ],
)  # fmt: skip
def test_outermost(glob: str, path: str, outermost: str | None) -> None:
    matcher = PathGlob(glob)
    assert matcher.outermost(path) == outermost
    assert matcher.covers(path) is (outermost is not None)


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("layers.*", "layers.0", True), ("layers.*", "model.layers.0", True), ("layers.*", "layers.0.wo", False),
        ("layers.**", "layers.0.wo", True), ("/layers.*", "model.layers.0", False), ("h.*", "h.0.h.1", True),
    ],
)  # fmt: skip
def test_matches_to_the_end(glob: str, path: str, matches: bool) -> None:
    assert PathGlob(glob).matches(path) is matches


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("*attention*", "_scaled_dot_product_flash_attention", True), ("*attention*", "Attention", False),
        ("mm", "mm", True), ("mm", "bmm", False), ("*mm", "addmm", True), ("{mm,bmm}", "bmm", True),
        ("{mm,bmm}", "addmm", False), ("a*a*a", "aa", False), ("a*a*a", "aXa1a", True), ("*", "", True),
    ],
)  # fmt: skip
def test_names(glob: str, name: str, matches: bool) -> None:
    assert NameGlob(glob).matches(name) is matches


_component = st.text("ab*?", min_size=1, max_size=5).filter(lambda text: "**" not in text)


@given(_component, st.text("ab", max_size=6))
def test_a_name_glob_means_what_the_obvious_regular_expression_means(glob: str, name: str) -> None:
    obvious = re.compile("".join({"*": ".*", "?": "."}.get(each, each) for each in glob))
    assert NameGlob(glob).matches(name) is (obvious.fullmatch(name) is not None)


@given(
    st.lists(_component | st.just("**"), min_size=1, max_size=4),
    st.lists(st.text("ab", min_size=1, max_size=2), max_size=5),
)
def test_a_path_glob_means_what_trying_every_way_means(parts: list[str], components: list[str]) -> None:
    def fits(pattern: list[str], rest: list[str]) -> bool:
        if not pattern:
            return not rest
        if pattern[0] == "**":
            least = 1 if len(pattern) == 1 else 0
            return any(fits(pattern[1:], rest[taken:]) for taken in range(least, len(rest) + 1))
        return bool(rest) and NameGlob(pattern[0]).matches(rest[0]) and fits(pattern[1:], rest[1:])

    prefixes = [end for end in range(1, len(components) + 1) if any(fits(parts, components[s:end]) for s in range(end))]
    expected = ".".join(components[: prefixes[0]]) if prefixes else None
    assert PathGlob(".".join(parts)).outermost(".".join(components)) == expected


def test_no_glob_makes_matching_slow() -> None:
    assert not NameGlob("*a" * 30 + "b").matches("a" * 5000)
    assert PathGlob("**.a." * 20 + "b").outermost(".".join(["a"] * 500)) is None


@pytest.mark.parametrize("glob", ["", "/", "a..b", ".a", "a.", "a**", "a.***", "a.{}", "a.{x,}", "a.]", "a/b", "{a.b}"])
def test_malformed_paths(glob: str) -> None:
    assert path_glob_problem(glob) is not None


def test_alternatives_are_bounded() -> None:
    assert name_glob_problem("{a,b}" * 9) == "stands for more than 256 alternatives"
    assert name_glob_problem("{a,b}" * 8) is None


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
FIGURES = get_args(get_type_hints(syntax.ExpectTotal)["figure"])
OF_PREDICATES = {"crosses cut", "annotated"}
NAMES_IN_ONE_PLACE = {"policylang", "chains", "round_trips", "ahead", "auto", "peak", "forward", "step", "lossless"}
NAMES_IN_ONE_PLACE |= {"loss", "into", "tokens"}  # of `chunk`
SIGNS = {"->", "→", *get_args(syntax.Comparison)}
WHERE = [pytest.param(each, id=f"{each.words[0]}-{each.sense}") for each in meanings()]


def known_words() -> set[str]:
    pairs = {terminal_texts().get(each, ("every 2nd",))[0] for each in word_pairs()}
    predicates = {*FLAGS, *MEASURES, *PROPERTIES, *OF_PREDICATES}
    named = {
        *ACTIONS, *lexer().openers, *FIGURES, *UNITS, *NAMES_IN_ONE_PLACE, "within", "stage", "stages", "3rd",
        "at least", "at most",
    }  # fmt: skip
    return {*keywords(), *pairs, *predicates, *named, *SIGNS}


def test_every_word_has_a_meaning_and_every_meaning_is_of_a_word() -> None:
    said = {word for each in meanings() for word in each.words}
    parts = {part for word in said for part in word.split()}  # `at least` says what `at` and `least` are
    assert known_words() - said - parts == set()
    assert said - known_words() == set()
    pairs = [(word, each.sense) for each in meanings() for word in each.words]
    assert len(pairs) == len(set(pairs)), "a word means one thing in one sense"
    for each in meanings():
        assert each.text[0].isupper()
        assert each.text.endswith(".")
        assert len(each.text) < 160


@pytest.mark.parametrize(
    ("words", "sense"),
    [
        *(((word,), "action") for word in ACTIONS),
        *(((word,), "unit") for word in UNITS),
        *(((word,), "measure") for word in MEASURES),
        *(((word,), "property") for word in PROPERTIES),
        *(((word,), "predicate") for word in (*FLAGS, *OF_PREDICATES)),
        *(((word,), "figure") for word in FIGURES),
        (("save", "recompute", "auto"), None),
    ],
)
def test_what_has_one_sense_has_that_one(words, sense) -> None:
    for word in words:
        assert meaning(word, sense) if sense else senses(word)


@pytest.mark.parametrize("each", WHERE)
def test_the_example_is_a_statement_in_which_the_word_means_that(each: Meaning) -> None:
    pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")
    from policylang.editor.hover import meaning_at

    assert f"\n### {each.section}\n" in PAGE or f"\n## {each.section}\n" in PAGE
    for word in each.words:
        source = Source("example", with_word(each, word))
        _, diagnostics = parse_file(source)
        assert diagnostics == ()
        words = words_of(source, 0, len(source.text))
        found = [said for at in range(len(words)) if (said := meaning_at(words, at)) is not None]
        assert each in found, source.text


def with_word(each: Meaning, word: str) -> str:
    """The example with this word of the entry in place of the one that stands there."""
    if stands(word, each.example):
        return each.example
    other = next(each_word for each_word in each.words if stands(each_word, each.example))
    return re.sub(edges(other), word, each.example, count=1)


def stands(word: str, text: str) -> bool:
    return re.search(edges(word), text) is not None


def edges(word: str) -> str:
    before, after = (r"(?<!\w)" if word[0].isalnum() else ""), (r"(?!\w)" if word[-1].isalnum() else "")
    return before + re.escape(word) + after


ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if "```apl" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_policies_of_a_page_are_what_it_says(page: Path) -> None:
    """Each is read, planned where it names a graph, and held to what its comments claim."""
    result = run_files([str(page)])
    assert result.found.diagnostics == (), render_text(result.found.diagnostics)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "codes"], ids=lambda page: page.stem)
def test_a_policy_that_is_only_shown_says_why(page: Path) -> None:
    """``apl ignore`` is a file that the commands of its page read, or has its reason in a line above it."""
    above = re.findall(r"(.*)\n```apl ignore$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line for line in above if not re.fullmatch(r"<!-- (file|not tested): .+ -->", line)] == []


@pytest.mark.parametrize("code", [code for code in sorted(CODES) if CODES[code].wrong])
def test_what_the_page_of_a_code_calls_wrong_is_wrong(code: str) -> None:
    """Of a mistake in the text, the code itself; of one on a graph, a text in which nothing else is wrong."""
    found = parse_policy(CODES[code].wrong, name=code).diagnostics
    if code[3] in "012":
        assert code in {diagnostic.code for diagnostic in found}
    else:
        assert [diagnostic for diagnostic in found if is_error(diagnostic)] == []


def test_the_language_reference_claims_what_it_shows() -> None:
    result = run_files([str(ROOT / "docs" / "language.md")])
    assert result.policies >= 30
    assert result.claims >= 80


def test_the_page_on_policy_tests_prints_what_is_printed() -> None:
    page = ROOT / "docs" / "policy-tests.md"
    result = run_files([str(page)])
    said = f"tested {result.policies} policies in 1 file: {result.claims} claims, all hold"
    assert said in page.read_text(encoding="utf-8")


def test_the_reference_shows_the_words_of_the_language() -> None:
    words = {word for word in keywords() if word.isidentifier()}
    for word in sorted(words | {*FLAGS, *MEASURES, *PROPERTIES, *group_names(), *ACTIONS, *UNITS}):
        assert re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", LANGUAGE), f"`{word}` is not in docs/language.md"


GATE = "layers.*.moe.router.gate::aten.mm.default"
BOTH = f"{GATE} | layers.*.attention.wo :: aten.mm.default"
GRAPH = """
%x = input
%gate = aten.mm.default(%x) layers.0.moe.router.gate
%within = aten.mm.default(%gate) layers.0.moe.router.gate.inner
%wo = aten.mm.default(%within) layers.0.attention.wo
%typed = aten.mm.dtype(%wo) layers.0.attention.wo
%sdpa = aten._scaled_dot_product_flash_attention.default(%typed) layers.0.attention
%last = aten.sin.default(%sdpa) layers.0
%next = aten.sin.default(%last) layers.1
%norm = aten.sin.default(%next) norm
---
%g = aten.cos.default(%gate, %within, %wo, %typed, %sdpa, %last, %next)
"""


def said(string: str) -> list[tuple[str, str]]:
    made = import_save_ops(string)
    return [(each.code, each.span.text) for each in made.diagnostics]


def saved(string: str) -> list[str]:
    made = import_save_ops(string)
    assert made.diagnostics == ()
    policy = parse_policy(made.text).policy
    facts, _ = read_graph(Source("graph", GRAPH))
    decisions = plan(policy, facts, FLAT).decisions
    return [facts.names[row] for row in facts.forward if decisions[row].action.saves and facts.modules[row] != "norm"]


def test_what_the_string_selects_is_saved_and_the_rest_of_the_layers_is_not():
    assert saved(GATE) == ["gate", "sdpa", "last", "next"]
    assert saved(BOTH) == ["gate", "wo", "sdpa", "last", "next"]
    assert saved("layers.[0-3].attention.w?::aten.mm.dtype") == ["typed", "sdpa", "last", "next"]


def test_the_text_is_a_policy_in_canonical_form_that_tells_where_it_is_from():
    text = import_save_ops(BOTH, "mine").text
    assert f"#     {BOTH}\n" in text
    assert "policy mine\n" in text
    assert text.endswith(
        "save aten.mm.default where module == layers.*.moe.router.gate\n"
        "save aten.mm.default where module == layers.*.attention.wo\n"
    )
    assert format_source(Source("mine.apl", text)).text == text
    assert import_save_ops(f"{GATE}|{GATE}").text.count("\nsave aten.mm") == 1
    assert import_save_ops("block::aten.mm.default").text.endswith('where module == "block"\n')
    unknown = import_save_ops("layers.*::deepep.dispatch.default")
    assert unknown.text is not None
    assert unknown.diagnostics[0].code == "APL102"


@pytest.mark.parametrize(
    ("string", "code", "underlined"),
    [
        ("", "APL530", ""), (f"{GATE} |", "APL530", ""), ("layers.*.wo", "APL530", "layers.*.wo"),
        ("layers.*.wo:aten.mm.default", "APL530", "layers.*.wo:aten.mm.default"),
        ("::aten.mm.default", "APL530", "::aten.mm.default"), ("layers.*.wo::", "APL530", "layers.*.wo::"),
        ("a::aten.mm.default::b", "APL530", "a::aten.mm.default::b"), ("layers.*.wo::mm", "APL530", "mm"),
        ("layers.*.wo::aten.mm", "APL530", "aten.mm"), ("layers.*.wo::aten.*.default", "APL530", "aten.*.default"),
        ("layers.*.wo::aten.mn.default", "APL101", "aten.mn.default"),
        ("layers.*.wo::aten.mm.defualt", "APL101", "aten.mm.defualt"),
        ("layers..wo::aten.mm.default", "APL112", "layers..wo"),
        ("layers.**.wo::aten.mm.default", "APL531", "layers.**.wo"),
        ("layers.{0,1}.wo::aten.mm.default", "APL531", "layers.{0,1}.wo"),
        ("/layers.0::aten.mm.default", "APL531", "/layers.0"), ("layers 0::aten.mm.default", "APL531", "layers 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_string(string, code, underlined):
    assert said(string) == [(code, underlined)]
    assert import_save_ops(string).text is None


def test_all_that_is_wrong_comes_in_one_run():
    assert [code for code, _ in said("a | layers..wo::aten.mm | b::aten.mn.default")] == [
        "APL530",
        "APL112",
        "APL530",
        "APL101",
    ]


GRAMMAR = grammar_file().read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_table_is_that_of_the_grammar_whatever_the_hash_seed(seed: str) -> None:
    program = (
        "from policylang.language.lexer import table_of\n"
        "from policylang.language.resources import grammar_file\n"
        "print(table_of(grammar_file().read_text(encoding='utf-8')), end='')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert made.stdout == GRAMMAR_TABLE.read_text(encoding="utf-8"), "run scripts/make_grammar_table.py"


TEXT = "policy p\nsave mm in layers.*; recompute every 2nd mm per blok\nexpect saved <= 1 GiB\nsave (mm or"
CACHES = (
    lexer_module.tables,
    lexer_module._terminals,
    lexer_module.lexer,
    parser.statement_parser,
)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", None])
def test_a_table_that_does_not_fit_is_not_used_and_the_grammar_says_the_same(tmp_path, monkeypatch, content) -> None:
    with_table = parse_file(Source("p.apl", TEXT))
    table = tmp_path / "table.json"
    table.write_text(table_of(GRAMMAR).replace(key(GRAMMAR), key("another grammar")) if content is None else content)
    monkeypatch.setattr(lexer_module, "TABLE", table)
    try:
        for cache in CACHES:
            cache.cache_clear()
        assert parse_file(Source("p.apl", TEXT)) == with_table
    finally:
        for cache in CACHES:
            cache.cache_clear()
