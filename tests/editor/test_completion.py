"""What is offered at a place, held against the grammar, the command line and what people type."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.api.planned_graphs import read_any
from policylang.commands.cli import main
from policylang.editor.completion import WordPlace, completion, offers_at, with_documentation
from policylang.editor.state import Document, State, index_of, read_text
from policylang.editor.word_offers import MARKS, MOST, WordOffer, keyword_offers
from policylang.graph.facts import Facts
from policylang.language import lexer
from policylang.language.cursor import Cursor, _fed, cursors_at, reading
from policylang.language.diagnostics import Source
from policylang.language.files import bundled_names, read_source
from policylang.language.lexer import split, terminal_texts, words_of, words_until
from policylang.language.parser import parse_file, statement_parser
from policylang.language.resources import grammar_file

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = ROOT / "docs" / "graphs"
TEXTS = [path.read_text() for path in sorted(ROOT.glob("[pet]*/**/*.apl"))] + [
    block.partition("\n")[2] for block in (ROOT / "docs" / "language.md").read_text().split("```apl")[1:]
]
TEXTS = [text.partition("\n```")[0] for text in TEXTS]
NUMBERS = {"INT", "NUMBER", "ORDINAL", "RANGE", "EVERY_NTH"}
At = Callable[..., list[str]]


facts_of_graph = cache(lambda name: read_any(GRAPHS / name))
"""One snapshot is one object, as in a server: what it has is counted once."""


def state(text: str, facts: Facts | None = None, path: Path | None = None) -> State:
    """Without a plan, which completion never waits for."""
    document = Document("untitled:policy", 1, Source("policy.apl", text), path)
    return State(document, read_text(document, facts, read_source), None, facts)


def made(folder: Path, text: str, graph: str | Path | None = None) -> State:
    """The state of a file of a folder, that need not be there."""
    facts = None if graph is None else facts_of_graph(graph)
    return state(text, facts, folder / "mine.apl")


FACTS = facts_of_graph("tensor_parallel.graph")
NO_TEXT = state("").text


def offered(here: State, cursor: Cursor) -> list[WordOffer]:
    return list(offers_at(WordPlace(here, cursor, index_of(here.facts)))[0])


@pytest.fixture
def at(tmp_path: Path) -> At:
    """The labels at the `|` of a text."""

    def found(text: str, graph: str | None = None, **options) -> list[str]:
        return [item.label for item in items(tmp_path, text, graph, **options)]

    return found


def items(tmp_path: Path, text: str, graph: str | None = None, *, trigger: str | None = None):
    offset = text.index("|")
    here = made(tmp_path, text.replace("|", "", 1), graph)
    return completion(here, offset, trigger=trigger).items


def inserted(tmp_path: Path, text: str, label: str, graph: str | None = None) -> str:
    """The text with an item put where it belongs."""
    (item,) = (each for each in items(tmp_path, text, graph) if each.label == label)
    plain = text.replace("|", "", 1)
    positions = state(plain).document.positions
    start, end = positions.offset(item.text_edit.range.start), positions.offset(item.text_edit.range.end)
    return plain[:start] + item.text_edit.new_text + plain[end:]


# --- the grammar ---
def is_free(word: str, kind: str, cursor: Cursor) -> bool:
    """Whether only the user knows the word: a name where he gives one, a number, an operator, a module, a file."""
    if kind in MARKS or kind in NUMBERS or kind == "STRING" or word in ("→", "µs", "μs"):
        return True
    is_value = cursor.kinds[-1:] == ("COMPARISON",) or word == "annotated"
    own = cursor.kinds[-1:] in (("POLICY",), ("LET",), ("OVER",), ("COMMA",))
    names = (
        "EVERYTHING" in cursor.accepted
        or cursor.kinds[-1:] == ("DEVICE",)
        or ("STRING" in cursor.accepted and "CUT" not in cursor.accepted)
    )
    return kind in ("NAME", "PATH") and (
        own or names or is_value or "[" in word or str(cursor.words[-1]) == "annotated"
    )


@cache
def places() -> list[tuple[State, tuple[Cursor, ...], str, str]]:
    """Every word of every statement that can be read, with the place that it stands in."""
    found = []
    for text in TEXTS:
        source = Source("policy.apl", text)
        here = State(Document("untitled:policy", 1, source), None)  # type: ignore[arg-type]
        for start, end in split(source).ranges:
            words = words_of(source, start, end)
            if "# error" in text[start:].partition("\n")[0]:
                continue
            if reading(tuple(word.type for word in words)).refused or parse_file(Source("", text[start:end]))[1]:
                continue
            for word in words:
                before = f"{text[: word.span.start]} "  # a word may follow the one before without a blank
                cursors = cursors_at(Source("policy.apl", before), len(before))
                found.append((here, cursors, str(word), word.type))
    return found


def test_there_are_places_of_every_kind() -> None:
    assert len(places()) > 1500
    assert {kind for _, _, _, kind in places()} >= terminal_texts().keys() - {"LPAR", "RPAR"}


def test_the_next_word_is_among_those_that_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policylang.editor.word_offers.lets_above", lambda text, cursor: {})
    known: dict[tuple, set[str]] = {}
    missing = []
    for here, cursors, word, kind in places():
        cursor = cursors[0]
        if is_free(word, kind, cursor):
            continue
        key = (len(cursors), cursor.kinds, str(cursor.words[-1]) if cursor.words else "", cursor.is_first)
        if key not in known:
            known[key] = {offer.text.split()[0] for each in cursors for offer in offered(here, each)}
        if word.split()[0] not in known[key]:
            missing.append((" ".join(map(str, cursor.words)), word))
    assert missing == []


def distinct() -> list[tuple[Cursor, str]]:
    """A place for each set of terminals behind each word, with the text before it."""
    found = {}
    for cursor in (each for _, cursors, _, _ in places() for each in cursors):
        key = (cursor.accepted, cursor.kinds[-1:], cursor.kinds[:1])
        found.setdefault(key, (cursor, cursor.source.text[cursor.begin : cursor.start]))
    return list(found.values())


def is_read(text: str) -> bool:
    words, wrong = words_until(Source("", text), 0, len(text))
    return wrong is None and not reading(tuple(word.type for word in words)).refused


def test_whatever_is_offered_is_read_where_it_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policylang.editor.word_offers.lets_above", lambda text, cursor: {})
    here = state("", FACTS)
    wrong = []
    for cursor, before in distinct():
        chosen = offered(here, cursor)
        assert len({offer.text for offer in keyword_offers(cursor)}) == len(list(keyword_offers(cursor)))
        for offer in chosen:
            text = offer.text
            if not text.endswith((".", "/")) and not is_read(f"{before}{text}"):
                halves = text in ("keep", "half", "up", "step")
                wrong += [] if halves else [f"{before}▮{text}"]
    assert wrong == []


@settings(max_examples=25)
@given(st.data())
def test_a_policy_can_be_written_from_what_is_offered_alone(data: st.DataObject) -> None:
    text = ""
    for _ in range(data.draw(st.integers(1, 10))):
        here = state(text, FACTS)
        cursors = cursors_at(here.document.source, len(text))
        choices = [each for cursor in cursors for each in offered(here, cursor) if not each.text.endswith((".", "/"))]
        if not choices:
            break
        text += f"{data.draw(st.sampled_from(choices)).text} "
        assert is_read(text), text


# --- what the snapshot has ---
def test_counts_are_those_of_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", str(GRAPHS / "fsdp.graph"), "--output-format", "json"])
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    shown = {item.label: item.detail for item in items(tmp_path, "save aten.|", "fsdp.graph") if "nodes" in item.detail}
    assert len(shown) > 15
    for label, detail in shown.items():
        mine = [node for node in nodes if node["operator"].startswith(f"{label}.")]
        forward = sum(node["phase"] == "forward" for node in mine)
        assert detail == f"{len(mine):,} nodes, {forward:,} forward"
    modules = {item.label: item.detail for item in items(tmp_path, "save mm in layers.0.|", "fsdp.graph")}
    for label, detail in modules.items():
        mine = [node for node in nodes if f"{node['module']}.".startswith(f"{label}.")]
        forward = sum(node["phase"] == "forward" and node["operator"] != "get_attr" for node in mine)
        assert detail == f"{len(mine):,} nodes, {forward:,} forward"


def test_groups_and_operators_of_the_snapshot_come_before_others(at: At) -> None:
    found = at("save a|", "fsdp.graph")
    assert found[:3] == ["attention", "all_gather", "allgather"]
    assert found.index("activation") < found.index("add") < found.index("all_to_all") < found.index("addmm")
    assert found.index("add") < found.index("addmm")
    assert "mm" in at("save m|", "fsdp.graph")
    assert "mm" in at("save m|")


def test_names_are_known_below_their_line_or_include_and_not_above(at: At, tmp_path: Path) -> None:
    text = "let early = mm\nsave |\nlet late = bmm\n"
    found = at(text, "fsdp.graph")
    assert "early" in found
    assert "late" not in found
    assert found.index("matmul") < found.index("early") < found.index("mul")
    assert "own" not in at("let own = |")
    (tmp_path / "names.apl").write_text("let mine = mm\n")
    assert "mine" in at('include "names.apl"\nsave |')
    assert "mine" not in at('save |\ninclude "names.apl"\n')


def test_an_operator_that_is_called_like_a_word_or_a_group_has_its_namespace(at: At) -> None:
    found = at("save |", "fsdp.graph")
    assert "aten.view" in found
    assert "view" in found
    assert "aten.where" in at("save wher|")
    assert "where" not in at("save wher|")


def test_namespaces_and_overloads_come_component_by_component(at: At) -> None:
    assert "_c10d_functional." in at("save _c|", "fsdp.graph")
    assert at("save _c10d_functional.wait|", "fsdp.graph")[0] == "_c10d_functional.wait_tensor"
    assert at("save aten.add.|", "fsdp.graph")[0] == "aten.add.Tensor"
    assert "add.Scalar" in at("save add.S|", "fsdp.graph")
    assert at("save cudnn|", "llama3_8b.graph")[0] == "_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize(
    ("text", "first", "among"),
    [
        ("save mm in lay|", "layers.*", "layers"),
        ("save mm in layers.|", "layers.*", "layers.31"),
        ("save mm in /|", "/model", "/lm_head"),
        ("save mm in layers.*.self|", "layers.*.self_attn", "layers.*.self_attn"),
        ("save mm in layers.**.q|", "layers.**.q_proj", "layers.**.q_proj"),
        ("save mm where module == layers.|", "layers.*", "layers.0"),
        ("blocks |", "layers.*", "model"),
        ('save mm in "layers.|"', '"layers.*"', '"layers.0"'),
    ],
)
def test_module_paths_come_component_by_component(at: At, text: str, first: str, among: str) -> None:
    found = at(text, "llama3_8b.graph")
    assert found[0] == first
    assert among in found


def test_a_module_that_is_called_like_a_word_is_quoted(tmp_path: Path) -> None:
    graph = tmp_path / "odd.graph.txt"
    nodes = ("%a = aten.mm.default(%x, %x) block", "%b = aten.mm.default(%a, %a) outside")
    graph.write_text("\n".join(["%x = input", *nodes, "output(%b)\n"]))
    found = [each.label for each in items(tmp_path, "save mm in |", graph)]
    assert '"block"' in found
    assert '"outside"' in found
    for label in ('"block"', '"outside"'):
        assert is_read(inserted(tmp_path, "save mm in |", label, graph))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("save mm where dtype == |", ["bf16", "bfloat16"]), ("save mm where device == |", ["cuda", "cuda:0"]),
        ("save mm where bytes |", [">", ">="]), ("save mm where dtype |", ["==", "!="]),
        ("save mm where bytes > 64|", ["64 MiB", "64 GiB"]), ("save mm where flops > 2 |", ["TFLOP", "GFLOP"]),
        ("save mm where time > 2 |", ["ms", "us"]), ("save mm where crosses |", ["block", "cut per 2 GiB"]),
        ("save mm where is not |", ["view", "random"]), ("save mm where from |", ["parameter", "buffer"]),
        ("expect |", ["saved", "saved per block"]), ("expect recomputed |", ["flops", "operators"]),
        ("expect saved <= 30% of |", ["forward"]), ("expect exposed <= 30% of |", ["step"]),
        ("undecided -> |", ["auto", "save"]), ("requires policylang >= |", ["0.2"]), ("fuse all_gather |", ["chains"]),
        ("collapse |", ["round_trips"]), ("prefetch all_gather 1 block |", ["ahead"]),
        ("bucket all_gather |", ["per block", "up to"]), ("overlap collective within 1 GiB of |", ["peak"]),
        ("recompute every |", ["1st", "2nd"]), ("mm -> |", ["recompute", "save"]), ("mm |", ["->", "in"]),
        ("save first mm |", ["in", "where"]),
    ],
)  # fmt: skip
def test_what_comes_first(at: At, text: str, first: list[str]) -> None:
    assert at(text, "fsdp.graph")[: len(first)] == first


def test_sizes_are_those_of_the_graph(tmp_path: Path) -> None:
    here = made(tmp_path, "", "fsdp.graph")
    sizes = {here.facts.bytes[row] for row in here.facts.forward}
    found = [each for each in items(tmp_path, "save mm where bytes > |", "fsdp.graph") if each.detail != "such as"]
    assert found[0].label == "4008 MiB"
    assert max(sizes) == 4008 * 2**20


def test_mesh_dimensions_come_from_the_graph(at: At) -> None:
    assert at("fuse all_gather chains over |", "tensor_parallel.graph") == ["tp", "dp"]
    assert at("fuse all_gather chains over |") == []


# --- files ---
def test_bundled_policies_come_with_their_first_sentence(tmp_path: Path) -> None:
    found = {each.label: each for each in items(tmp_path, "include <|")}
    assert set(found) == {f"<{name}>" for name in bundled_names() if name != "prelude"}
    assert found["<llama3_sac>"].detail.startswith("Selective checkpointing for decoder-only transformers")
    here = state("include <")
    assert "recompute" in with_documentation(here, found["<llama3_sac>"]).documentation.value


def test_files_beside_and_below(tmp_path: Path) -> None:
    (tmp_path / "other.apl").write_text("save mm\n")
    (tmp_path / "mine.apl").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "deep.apl").write_text("")
    (tmp_path / "cluster.toml").write_text("")
    labels = [each.label for each in items(tmp_path, 'include "|')]
    assert labels == ['"other.apl"', '"parts/']  # not itself
    assert [each.label for each in items(tmp_path, 'include "parts/|"')] == ['"parts/deep.apl"']
    assert inserted(tmp_path, 'include "pa|"', '"parts/') == 'include "parts/'
    assert '"cluster.toml"' in [each.label for each in items(tmp_path, "device |")]
    assert inserted(tmp_path, "device h1|", "h100-sxm") == "device h100-sxm"
    assert inserted(tmp_path, "device h100-|sxm", "h100-sxm") == "device h100-sxm"


def test_a_text_without_a_file_has_none_beside() -> None:
    found = completion(state('include "'), 9)
    assert found.items == []
    assert "<fsdp>" in [each.label for each in completion(state("include "), 8).items]


# --- the text ---
@pytest.mark.parametrize("text", ["# sa|", "save mm  # sa|ve", "# |", "save (mm, # a|\n bmm)", "// sa|"])
def test_nothing_in_comments(at: At, text: str) -> None:
    assert at(text) == []


@pytest.mark.parametrize(
    ("text", "label", "becomes"),
    [
        ("sa|ve mm", "save", "save mm"), ("save aten.m|m.default in block", "aten.mm", "save aten.mm in block"),
        ("save mm in layers.*.att|ention.wq", "layers.*.attention", "save mm in layers.*.attention"),
        ("include <fs|", "<fsdp>", "include <fsdp>"), ("include <fs|dp_tp>", "<fsdp>", "include <fsdp>"),
        ("save mm where by|", "bytes", "save mm where bytes"),
        ("save mm where bytes >| 3", ">=", "save mm where bytes >= 3"),
        ("save mm where bytes > 64|", "64 MiB", "save mm where bytes > 64 MiB"),
        ("save mm up| ", "up to", "save mm up to "), ("save first mm per bl|", "block", "save first mm per block"),
        ("mm -|", "->", "mm ->"), ("save mm\r\nrec|\r\n", "recompute", "save mm\r\nrecompute\r\n"),
        ('save mm in "🦙.x"; sa|', "save", 'save mm in "🦙.x"; save'),
        ("save (  # 🦙🦙\n  m|, bmm)", "mm", "save (  # 🦙🦙\n  mm, bmm)"),
    ],
)  # fmt: skip
def test_an_item_replaces_the_word_at_the_cursor(tmp_path: Path, text: str, label: str, becomes: str) -> None:
    assert inserted(tmp_path, text, label, "fsdp.graph") == becomes


@pytest.mark.parametrize(
    "text",
    [
        "sav mm in |", "save mm bmm in |", "save all-gather in |", "save (mm\nsave bmm in |", "save mm ! in |",
        "save (\n  mm in |", "save (mm, first (\n bmm in |", "let x = mm\nfoo foo foo\nsave x in |\n)))\n((",
        "optional save mm; save bmm in |", "save mm in |\nrecompute ((",
    ],
)  # fmt: skip
def test_a_broken_text_is_completed_by_what_can_be_read_before(at: At, text: str) -> None:
    assert at(text, "fsdp.graph")[:2] == ["block", "first block"]


def test_a_parenthesis_that_is_never_closed_does_not_swallow_what_follows(at: At) -> None:
    assert "recompute" in at("save (mm bmm\n\nrec|")
    assert at("save (\n    m|\n", "fsdp.graph")[0] == "matmul"


def test_no_text_is_too_odd() -> None:
    for text in ["", "(", '"', "{", "[", "<", "\x00", "🦙", "((((;;", "\r"]:
        for more in ["", " ", '"', "{", "[", "<", ".", "*", "-", "/", "\n)"]:
            for before in ("", "save ", "save mm in ", "save mm where "):
                whole = f"{before}{text}{more}"
                completion(State(Document("untitled:policy", 1, Source("", whole)), NO_TEXT, None, FACTS), len(whole))


@settings(max_examples=15)
@given(st.lists(st.sampled_from([*'save (mm){}[]"<>.,;#\n*/-|=%🦙', "in ", "where ", "per ", "layers."]), max_size=12))
def test_random_texts_are_answered(parts: list[str]) -> None:
    text = "".join(parts)
    here = state(text)
    for offset in range(len(text) + 1):
        for item in completion(here, offset).items[:2]:
            found = item.text_edit.range
            positions = here.document.positions
            assert positions.offset(found.start) <= offset <= positions.offset(found.end)


# --- what clients do with it ---
def test_a_blank_a_quote_and_a_sign_open_a_list_only_where_something_follows(at: At) -> None:
    assert at("save |", trigger=" ")
    assert at("save mm in |", trigger=" ")
    assert at("mm -> |", trigger=" ")
    assert at("save mm |", trigger=" ") == []  # who goes on with Enter wants a new line
    assert at("  |", trigger=" ") == []
    assert at("save mm |") != []
    assert at("include <|", trigger="<")
    assert at("save mm where bytes <|", trigger="<") == []
    assert at('blocks "|', "fsdp.graph", trigger='"')
    assert at('save mm in "layers"|', "fsdp.graph", trigger='"') == []
    assert at("save (|", trigger="(")


def test_long_lists_are_cut_and_asked_for_again(tmp_path: Path) -> None:
    text = "save aten."
    here = made(tmp_path, text)
    found = completion(here, len(text))
    assert found.is_incomplete
    assert len(found.items) == MOST
    assert [item.sort_text for item in found.items] == sorted(item.sort_text for item in found.items)
    there = made(tmp_path, "undecided -> ")
    assert not completion(there, 13).is_incomplete


def test_items_say_what_they_mean_when_asked(tmp_path: Path) -> None:
    text = "save mm "
    here = made(tmp_path, text)
    found = {item.label: with_documentation(here, item) for item in completion(here, len(text)).items}
    assert "in" in found
    assert all(item.documentation is not None for item in found.values())
    assert all(item.documentation is None for item in completion(here, len(text)).items)
    assert with_documentation(None, found["in"]).label == "in"  # the document is closed by now


def test_a_broken_include_takes_no_word_away(at: At) -> None:
    assert "save" in at('include "none.apl"\nsa|')


def test_a_statement_of_any_length_is_completed() -> None:
    text = f"save ({'mm, ' * 3000}"
    here = State(Document("untitled:policy", 1, Source("", text)), NO_TEXT, None, FACTS)
    assert "attention" in [item.label for item in completion(here, len(text)).items]
    longer = State(Document("untitled:policy", 1, Source("", text * 6)), NO_TEXT, None, FACTS)
    assert completion(longer, 6 * len(text)).items == []  # more than a statement may hold


def test_annotations_of_the_graph_are_offered_in_quotes_where_they_need_them() -> None:
    names = [("ap_must_save",)] * 3 + [("block", "two words")] + [()] * (len(FACTS) - 4)
    facts = attrs.evolve(FACTS, annotations=names)
    for text, before in (("save mm where annotated ", ""), ("save mm where an", "annotated ")):
        found = {item.label: item.detail for item in completion(state(text, facts), len(text)).items}
        wanted = {f"{before}ap_must_save": "3 nodes", f'{before}"block"': "1 node", f'{before}"two words"': "1 node"}
        assert found == wanted
        assert all(is_read(f"save mm where annotated {label.removeprefix('annotated ')}") for label in found)


@pytest.mark.slow
def test_a_new_word_of_the_grammar_is_offered_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = grammar_file().read_text()
    text = text.replace('("saved" | "recomputed" |', '("saved" | "pinned" "down" | "recomputed" |')
    file = tmp_path / "apl.lark"
    file.write_text(text)
    cached = (lexer.tables, lexer._terminals, lexer.lexer, terminal_texts)
    cached = (*cached, statement_parser, reading, _fed)
    with monkeypatch.context() as patched:
        patched.setattr(lexer, "grammar_file", lambda: file)
        for each in cached:
            each.cache_clear()
        found = [item.label for item in completion(state("expect every mm "), len("expect every mm ")).items]
    for each in cached:
        each.cache_clear()
    assert "pinned down" in found
