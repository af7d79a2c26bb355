"""Every form of the language, as it is shown where the language is described, and the tree it makes."""

from fractions import Fraction
from pathlib import Path

import pytest
from attrs import frozen

import policylang
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.formatting import format_source
from policylang.language.lexer import keywords
from policylang.language.loader import load_policy, parse_policy
from policylang.language.parser import parse_file
from policylang.language.statements import ACTIONS, format_policy
from policylang.language.syntax import (
    Action,
    And,
    Annotated,
    Blocks,
    BlockSet,
    Bucket,
    Chain,
    ChainOf,
    Collapse,
    Compare,
    CrossesCut,
    Delay,
    Difference,
    Everything,
    ExpectCount,
    ExpectFate,
    ExpectLossless,
    ExpectTotal,
    Feeding,
    Fuse,
    InBlock,
    InModule,
    Intersection,
    Is,
    KeepOrder,
    Match,
    NarrowForm,
    Not,
    Operator,
    Or,
    Ordinal,
    Overlap,
    Policy,
    Prefetch,
    PrefetchOffloaded,
    Quantity,
    Reference,
    Rewriting,
    Rule,
    Scope,
    Selector,
    Step,
    Undecided,
    Union,
    Where,
)


@frozen
class Told:
    code: str
    underlined: str
    message: str
    help: str | None = None


def told(text: str) -> list[Told]:
    return [as_told(each) for each in parse_policy(text).diagnostics]


def as_told(diagnostic: Diagnostic) -> Told:
    underlined = diagnostic.span.text if diagnostic.span is not None else ""
    return Told(diagnostic.code, underlined, diagnostic.message, diagnostic.help)


def policy(text: str) -> Policy:
    """The policy of a text that is free of errors and warnings, but for `and` of two operators: it has a meaning."""
    loaded = parse_policy(text)
    assert {each.code for each in loaded.diagnostics} <= {"APL151"}
    assert loaded.policy is not None
    return loaded.policy


def rule(text: str) -> Rule:
    (only,) = policy(text).rules
    return only


def selector(text: str) -> Selector:
    return rule(f"save {text}").selector


MM = Operator(None, "mm", None)
ADD = Operator(None, "add", None)
BMM = Operator(None, "bmm", None)
RELU = Operator(None, "relu", None)
GATHER = Reference("all_gather")
ANY_BLOCK = BlockSet("any")
FROM_PARAMETER = Is("from parameter")

LLAMA3 = """\
# policies/llama3_sac.apl: op-level selective checkpointing, as TorchTitan does it
policy llama3_sac

blocks layers.*                         # one block per transformer layer

recompute everything in block           # the ground rule
save attention in block
save matmul in block
recompute every 2nd mm per block        # the exception to the line above
save first add per block                # the attention residual
save everything in block where crosses block

must_recompute chain through all_gather where from parameter      # FSDP: reshard after forward

expect saved per block <= 220 MiB
expect every (all_gather where from parameter) recomputed
"""


def test_a_whole_policy() -> None:
    found = policy(LLAMA3)
    assert (found.name, found.blocks, found.undecided) == ("llama3_sac", Blocks("layers.*"), None)
    assert found.rules == (
        Rule(Action.RECOMPUTE, InBlock(Everything(), ANY_BLOCK, False)),
        Rule(Action.SAVE, InBlock(Reference("attention"), ANY_BLOCK, False)),
        Rule(Action.SAVE, InBlock(Reference("matmul"), ANY_BLOCK, False)),
        Rule(Action.RECOMPUTE, Ordinal("every", 2, MM, scope=Scope.BLOCK)),
        Rule(Action.SAVE, Ordinal("first", 1, ADD, scope=Scope.BLOCK)),
        Rule(Action.SAVE, Where(InBlock(Everything(), ANY_BLOCK, False), Is("crosses block"))),
        Rule(Action.MUST_RECOMPUTE, Chain("through", Where(GATHER, FROM_PARAMETER))),
    )
    assert found.expectations == (
        ExpectTotal("saved", "<=", Quantity(220 * 1024**2, "bytes"), per_block=True),
        ExpectFate("every", Where(GATHER, FROM_PARAMETER), "recomputed"),
    )
    assert found.rules[3].source == "<policy>:9"
    assert found.rules[3].text == "recompute every 2nd mm per block"


def test_the_sentences_people_say_aloud() -> None:
    found = policy("save first add per block; recompute every 2nd mm; allgather chain after wait → must_recompute")
    assert found.rules == (
        Rule(Action.SAVE, Ordinal("first", 1, ADD, scope=Scope.BLOCK)),
        Rule(Action.RECOMPUTE, Ordinal("every", 2, MM)),
        Rule(Action.MUST_RECOMPUTE, ChainOf(Reference("allgather"), "after", Reference("wait"))),
    )


_ACTIONS = {**{each.word: each for each in Action}, "must_save": Action.SAVE, "prefer_recompute": Action.RECOMPUTE}


@pytest.mark.parametrize(("word", "action"), _ACTIONS.items())
def test_an_action_stands_before_or_behind(word: str, action: Action) -> None:
    assert {rule(f"{word} mm"), rule(f"mm -> {word}"), rule(f"mm → {word}")} == {Rule(action, MM)}


def test_modifiers() -> None:
    assert rule("optional save mm") == Rule(Action.SAVE, MM, optional=True)
    assert rule("override save mm") == Rule(Action.SAVE, MM, override=True)
    for text in ("optional override save mm", "override optional mm -> save"):
        assert rule(text) == Rule(Action.SAVE, MM, True, True)


SELECTORS = [
    ("everything", Everything()),
    ("mm", MM),
    ("aten.mm", Operator("aten", "mm", None)),
    ("aten.mm.default", Operator("aten", "mm", "default")),
    ("add.Tensor", Operator(None, "add", "Tensor")),
    ("aten.*attention*", Operator("aten", "*attention*", None)),
    ("aten.{mm,bmm}", Operator("aten", "{mm,bmm}", None)),
    ("higher_order.flex_attention", Operator("higher_order", "flex_attention", None)),
    ("builtin.getitem", Operator("builtin", "getitem", None)),
    ("getitem", Operator("builtin", "getitem", None)),
    ("aten.view", Operator("aten", "view", None)),
    ("aten.where", Operator("aten", "where", None)),
    ("torch.sym_max", Operator("torch", "sym_max", None)),
    ("mm in layers.*.attention", InModule(MM, "layers.*.attention", False)),
    ("mm in layers.{0, 1, 31}", InModule(MM, "layers.{0, 1, 31}", False)),
    ("mm in layers.[0-3]", InModule(MM, "layers.[0-3]", False)),
    ("mm in /model.**.wo", InModule(MM, "/model.**.wo", False)),
    ('mm in "block"', InModule(MM, "block", False)),
    ("mm in 0.1", InModule(MM, "0.1", False)),
    ("mm outside encoder.*", InModule(MM, "encoder.*", True)),
    ("mm in block", InBlock(MM, ANY_BLOCK, False)),
    ("mm outside block", InBlock(MM, ANY_BLOCK, True)),
    ("mm in every 2nd block", InBlock(MM, BlockSet("every", n=2, start=2), False)),
    ("mm in every 2nd block from 1st", InBlock(MM, BlockSet("every", n=2, start=1), False)),
    ("mm in first 4 blocks", InBlock(MM, BlockSet("first", n=4), False)),
    ("mm in first half of blocks", InBlock(MM, BlockSet("first", share=Fraction(1, 2)), False)),
    ("mm in first half  of block", InBlock(MM, BlockSet("first", share=Fraction(1, 2)), False)),
    ("mm in last 29% of blocks", InBlock(MM, BlockSet("last", share=Fraction(29, 100)), False)),
    ("mm in last 12.5 % of blocks", InBlock(MM, BlockSet("last", share=Fraction(1, 8)), False)),
    ("mm in half", InModule(MM, "half", False)),
    ("mm in last block", InBlock(MM, BlockSet("last", n=1), False)),
    ("mm in blocks 0..3", InBlock(MM, BlockSet("range", low=0, high=3), False)),
    ("mm in block 3", InBlock(MM, BlockSet("range", low=3, high=3), False)),
    ("mm in 3rd block", InBlock(MM, BlockSet("range", low=2, high=2), False)),
    ("first mm", Ordinal("first", 1, MM)),
    ("last mm", Ordinal("last", 1, MM)),
    ("3rd mm", Ordinal("nth", 3, MM)),
    ("first 2 mm", Ordinal("first", 2, MM)),
    ("every 2nd mm", Ordinal("every", 2, MM)),
    ("every 2nd mm from 1st", Ordinal("every", 2, MM, start=1)),
    ("every 2nd mm from 1st per block", Ordinal("every", 2, MM, start=1, scope=Scope.BLOCK)),
    ("every 2nd mm per block from 1st", Ordinal("every", 2, MM, start=1, scope=Scope.BLOCK)),
    ("every 2nd mm per module", Ordinal("every", 2, MM, scope=Scope.MODULE)),
    ("every 2nd mm per chain", Ordinal("every", 2, MM, scope=Scope.CHAIN)),
    ("last all_gather chain per chain", Ordinal("last", 1, ChainOf(GATHER), scope=Scope.CHAIN)),
    ("(last all_gather per chain) chain", ChainOf(Ordinal("last", 1, GATHER, scope=Scope.CHAIN))),
    ("every 2nd mm per graph", Ordinal("every", 2, MM, scope=Scope.GRAPH)),
    ("mm where bytes >= 64 MiB", Where(MM, Compare("bytes", ">=", Quantity(64 * 1024**2, "bytes")))),
    ("mm or bmm", Union((MM, BMM))),
    ("mm, bmm", Union((MM, BMM))),
    ("mm, bmm or add, relu", Union((MM, BMM, ADD, RELU))),
    ("mm and bmm", Intersection(MM, BMM)),
    ("mm except bmm", Difference(MM, BMM)),
    (
        "mm or bmm except in last 2 blocks",
        Difference(Union((MM, BMM)), InBlock(Everything(), BlockSet("last", n=2), False)),
    ),
    ("mm except in 0.1", Difference(MM, InModule(Everything(), "0.1", False))),
    ("mm or bmm and add", Intersection(Union((MM, BMM)), ADD)),
    ("mm, bmm and add", Union((MM, Intersection(BMM, ADD)))),
    ("mm except bmm or add", Union((Difference(MM, BMM), ADD))),
    ("mm except (bmm or add)", Difference(MM, Union((BMM, ADD)))),
    ("(mm)", MM),
    ("users of mm", Step("users", MM)),
    ("inputs of mm", Step("inputs", MM)),
    ("mm feeding add", Feeding(MM, ADD)),
    ("mm fed by add", Feeding(MM, ADD, reverse=True)),
    ("chain after mm", Chain("after", MM)),
    ("chain before mm", Chain("before", MM)),
    ("chain through mm", Chain("through", MM)),
    ("all_gather chain", ChainOf(GATHER)),
    ("all_gather chain after wait", ChainOf(GATHER, "after", Reference("wait"))),
    ("all_gather chain before (mm or bmm)", ChainOf(GATHER, "before", Union((MM, BMM)))),
]


@pytest.mark.parametrize(("text", "tree"), SELECTORS, ids=[text for text, _ in SELECTORS])
def test_selectors(text: str, tree: object) -> None:
    assert selector(text) == tree


BINDING = [
    # the filters narrow the atom first, then the nearest prefix applies, then the next one out
    ("first add in layers.0 per block", Ordinal("first", 1, InModule(ADD, "layers.0", False), scope=Scope.BLOCK)),
    ("chain through all_gather where from parameter", Chain("through", Where(GATHER, FROM_PARAMETER))),
    ("first users of mm in block", Ordinal("first", 1, Step("users", InBlock(MM, ANY_BLOCK, False)))),
    # filters and `chain` go left to right
    ("mm where is view in block chain", ChainOf(InBlock(Where(MM, Is("is view")), ANY_BLOCK, False))),
    ("mm chain in block", InBlock(ChainOf(MM), ANY_BLOCK, False)),
    # `per` goes to the innermost position that has none
    ("first 2 every 3rd mm per block", Ordinal("first", 2, Ordinal("every", 3, MM, scope=Scope.BLOCK))),
    ("first 2 every 3rd mm per block per graph",
     Ordinal("first", 2, Ordinal("every", 3, MM, scope=Scope.BLOCK), scope=Scope.GRAPH)),
    ("first (every 3rd mm) per block", Ordinal("first", 1, Ordinal("every", 3, MM), scope=Scope.BLOCK)),
    ("first chain after mm per block", Ordinal("first", 1, Chain("after", MM), scope=Scope.BLOCK)),
    ("every 2nd mm in every 3rd block from 1st",
     Ordinal("every", 2, InBlock(MM, BlockSet("every", n=3, start=1), False))),
    ("first mm where crosses cut per 2 GiB per block",
     Ordinal("first", 1, Where(MM, CrossesCut(Quantity(2 * 1024**3, "bytes"))), scope=Scope.BLOCK)),
    # `or` and its like join whole phrases
    ("first mm per block or bmm in block",
     Union((Ordinal("first", 1, MM, scope=Scope.BLOCK), InBlock(BMM, ANY_BLOCK, False)))),
    # inside `where`, `and` and `or` belong to the predicate
    ("mm where is view or is random", Where(MM, Or((Is("is view"), Is("is random"))))),
    ("(mm where is view) or bmm", Union((Where(MM, Is("is view")), BMM))),
    ("mm where is view, bmm", Union((Where(MM, Is("is view")), BMM))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "tree"), BINDING, ids=[text for text, _ in BINDING])
def test_binding(text: str, tree: object) -> None:
    assert selector(text) == tree


PREDICATES = [
    *((f"{name} {sign} 3", Compare(name, sign, Quantity(3, "number")))  # type: ignore[arg-type]
      for name in ("numel", "ndim", "users", "inputs", "group_size")
      for sign in ("==", "!=", "<", "<=", ">", ">=")),
    ("bytes > 64 MiB", Compare("bytes", ">", Quantity(64 * 1024**2, "bytes"))),
    ("bytes > 64MiB", Compare("bytes", ">", Quantity(64 * 1024**2, "bytes"))),
    ("bytes > 1000", Compare("bytes", ">", Quantity(1000, "bytes"))),
    ("flops >= 2 GFLOP", Compare("flops", ">=", Quantity(2e9, "flops"))),
    ("flops >= 1.5 TFLOPs", Compare("flops", ">=", Quantity(1.5e12, "flops"))),
    ("numel >= 1_000_000", Compare("numel", ">=", Quantity(1e6, "number"))),
    ("shape[0] == 8192", Compare("shape", "==", Quantity(8192, "number"), index=0)),
    ("shape[-1] == 4096", Compare("shape", "==", Quantity(4096, "number"), index=-1)),
    ("dtype == bf16", Match("dtype", "==", "bfloat16")),
    ("dtype != torch.float32", Match("dtype", "!=", "float32")),
    ("dtype == float8*", Match("dtype", "==", "float8*")),
    ("device == cuda", Match("device", "==", "cuda")),
    ("device == cuda:0", Match("device", "==", "cuda:0")),
    ("module == layers.0.*", Match("module", "==", "layers.0.*")),
    ("overload == Tensor", Match("overload", "==", "Tensor")),
    *((name, Is(name))  # type: ignore[arg-type]
      for name in ("from parameter", "gathered parameter", "crosses block", "feeds backward", "is view", "is random",
                   "is multi_output", "is mutated", "user tagged", "recorded saved", "recorded offloaded",
                   "from buffer", "from input", "gathered buffer", "gathered input")),
    ("crosses cut per 2 GiB", CrossesCut(Quantity(2 * 1024**3, "bytes"))),
    ("crosses cut per auto", CrossesCut(None)),
    *((f"annotated {written}", Annotated(name)) for written, name in (
        ("ap_must_save", "ap_must_save"), ("saved", "saved"), ("offloaded", "offloaded"), ("block", "block"),
        ("mine.stage", "mine.stage"), ('"save"', "save"), ('"two words"', "two words"))),
    ("annotated a or not annotated b and is view",
     Or((Annotated("a"), And((Not(Annotated("b")), Is("is view")))))),
    ("crosses cut per 1_000 and is not view",
     And((CrossesCut(Quantity(1000, "bytes")), Not(Is("is view"))))),
    ("not is view", Not(Is("is view"))),
    ("is not view", Not(Is("is view"))),
    ("is view and not is random or users > 1",
     Or((And((Is("is view"), Not(Is("is random")))), Compare("users", ">", Quantity(1, "number"))))),
    ("is view and (is random or is mutated)", And((Is("is view"), Or((Is("is random"), Is("is mutated")))))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "tree"), PREDICATES, ids=[text for text, _ in PREDICATES])
def test_predicates(text: str, tree: object) -> None:
    assert selector(f"mm where {text}") == Where(MM, tree)  # type: ignore[arg-type]


MIB = 1024**2
EXPECTATIONS = [
    ("saved <= 6.4 GiB", ExpectTotal("saved", "<=", Quantity(6.4 * 1024 * MIB, "bytes"))),
    ("saved per block <= 220 MiB", ExpectTotal("saved", "<=", Quantity(220 * MIB, "bytes"), per_block=True)),
    ("recomputed flops <= 20%", ExpectTotal("recomputed flops", "<=", Quantity(0.2, "fraction"))),
    ("saved <= 30% of forward", ExpectTotal("saved", "<=", Quantity(0.3, "fraction"))),
    ("recomputed per block <= 30% of forward", ExpectTotal("recomputed", "<=", Quantity(0.3, "fraction"), True)),
    ("recomputed operators <= 40%", ExpectTotal("recomputed operators", "<=", Quantity(0.4, "fraction"))),
    ("recomputed operators <= 40% of forward", ExpectTotal("recomputed operators", "<=", Quantity(0.4, "fraction"))),
    ("recomputed time <= 8%", ExpectTotal("recomputed time", "<=", Quantity(0.08, "fraction"))),
    ("recomputed time per block <= 40 ms", ExpectTotal("recomputed time", "<=", Quantity(0.04, "seconds"), True)),
    ("exposed < 5% of step", ExpectTotal("exposed", "<", Quantity(0.05, "fraction"))),
    ("exposed <= 12.5 ms", ExpectTotal("exposed", "<=", Quantity(0.0125, "seconds"))),
    ("host  memory <= 64 MiB", ExpectTotal("host memory", "<=", Quantity(2.0**26, "bytes"))),
    ("host memory per host < 512 MiB", ExpectTotal("host memory per host", "<", Quantity(2.0**29, "bytes"))),
    ("step  time <= 900 ms", ExpectTotal("step time", "<=", Quantity(0.9, "seconds"))),
    ("recomputed operators per block <= 12", ExpectTotal("recomputed operators", "<=", Quantity(12, "number"), True)),
    ("recomputed flops <= 5 TFLOP", ExpectTotal("recomputed flops", "<=", Quantity(5e12, "flops"))),
    ("recomputed <= 1 GiB", ExpectTotal("recomputed", "<=", Quantity(1024 * MIB, "bytes"))),
    ("peak <= 40 GiB", ExpectTotal("peak", "<=", Quantity(40 * 1024 * MIB, "bytes"))),
    ("exactly 7 mm per block", ExpectCount("exactly", 7, MM, Scope.BLOCK)),
    ("exactly 7 (mm or bmm) per block", ExpectCount("exactly", 7, Union((MM, BMM)), Scope.BLOCK)),
    ("exactly 1 (first mm) per block", ExpectCount("exactly", 1, Ordinal("first", 1, MM), Scope.BLOCK)),
    ("exactly 1 first mm per block", ExpectCount("exactly", 1, Ordinal("first", 1, MM, scope=Scope.BLOCK))),
    ("at least 1 attention", ExpectCount("at least", 1, Reference("attention"))),
    ("at most 3 mm", ExpectCount("at most", 3, MM)),
    ("no mm saved", ExpectFate("no", MM, "saved")),
    ("every mm saved", ExpectFate("every", MM, "saved")),
    ("every mm recomputed", ExpectFate("every", MM, "recomputed")),
    ("every mm offloaded", ExpectFate("every", MM, "offloaded")),
    ("every 2nd mm saved", ExpectFate("every", Ordinal("every", 2, MM), "saved")),
    ("no mm where recorded saved saved", ExpectFate("no", Where(MM, Is("recorded saved")), "saved")),
]


@pytest.mark.parametrize(("text", "tree"), EXPECTATIONS, ids=[text for text, _ in EXPECTATIONS])
def test_expectations(text: str, tree: object) -> None:
    assert policy(f"expect {text}").expectations == (tree,)


@pytest.mark.parametrize("fate", ["auto", "save", "recompute"])
def test_undecided(fate: str) -> None:
    assert policy(f"undecided -> {fate}").undecided == Undecided(fate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("fuse all_gather chains", Fuse("all_gather")),
        ("fuse all_gather chains over dp, tp", Fuse("all_gather", ("dp", "tp"))),
        ("fuse reduce_scatter chains over tp", Fuse("reduce_scatter", ("tp",))),
        ("collapse round_trips", Collapse()),
        ("optional fuse all_gather chains over dp", Fuse("all_gather", ("dp",), optional=True)),
        ("optional collapse round_trips", Collapse(optional=True)),
    ],
)
def test_rewrites(text: str, tree: Rewriting) -> None:
    assert policy(text).rewrites == (tree,)


PARAMETERS = Where(GATHER, Is("from parameter"))
SCATTER = Reference("reduce_scatter")
COLLECTIVE = Reference("collective")


def mib(size: float) -> Quantity:
    return Quantity(size * 2**20, "bytes")


ORDERING = [
    ("bucket all_gather per block", Bucket(GATHER, 1)),
    ("bucket all_gather where from parameter per block", Bucket(PARAMETERS, 1)),
    ("bucket (all_gather where from parameter) per 2 blocks up to 512 MiB", Bucket(PARAMETERS, 2, mib(512))),
    ("optional bucket all_gather, reduce_scatter per 2 blocks", Bucket(Union((GATHER, SCATTER)), 2, optional=True)),
    ("bucket reduce_scatter up to 256 MiB", Bucket(SCATTER, None, mib(256))),
    ("bucket (first 2 all_gather per block) per block", Bucket(Ordinal("first", 2, GATHER, scope=Scope.BLOCK), 1)),
    ("bucket first 2 all_gather per 2 blocks", Bucket(Ordinal("first", 2, GATHER), 2)),
    ("prefetch all_gather 1 block ahead", Prefetch(GATHER, 1)),
    ("optional prefetch all_gather where from parameter 2 blocks ahead", Prefetch(PARAMETERS, 2, optional=True)),
    ("prefetch all_gather in last 4 blocks 1 block ahead", Prefetch(InBlock(GATHER, BlockSet("last", 4), False), 1)),
    ("delay reduce_scatter 1 block", Delay(SCATTER, 1)),
    ("delay reduce_scatter 3 blocks", Delay(SCATTER, 3)),
    ("overlap collective", Overlap(COLLECTIVE)),
    ("overlap collective up to 2 GiB in flight", Overlap(COLLECTIVE, mib(2048))),
    ("overlap collective within 0 GiB of peak", Overlap(COLLECTIVE, None, mib(0))),
    (
        "optional overlap collective up to 2 GiB in flight within 5% of peak",
        Overlap(COLLECTIVE, mib(2048), Quantity(0.05, "fraction"), optional=True),
    ),
    ("keep order of all_to_all", KeepOrder(Reference("all_to_all"))),
]


@pytest.mark.parametrize(("text", "tree"), ORDERING, ids=[text for text, _ in ORDERING])
def test_ordering(text: str, tree: object) -> None:
    found = policy(text)
    assert (*found.rewrites, *found.scheduling) == (tree,)
    assert found.orders
    again = parse_policy(format_policy(found)).policy
    assert (*again.rewrites, *again.scheduling) == (tree,)


def test_when_copies_back_start_is_said_once_and_a_file_overrides_what_it_includes(tmp_path: Path) -> None:
    said = "offload mm\noptional prefetch  offloaded 3 block ahead"
    (tmp_path / "moved.apl").write_text(said, encoding="utf-8")
    found = policy(said)
    assert found.prefetch_offloaded == PrefetchOffloaded(3, optional=True)
    assert "\noptional prefetch offloaded 3 blocks ahead\n" in format_policy(found)
    assert policy(format_policy(found)).prefetch_offloaded == found.prefetch_offloaded
    main = tmp_path / "main.apl"
    main.write_text('include "moved.apl"\nprefetch offloaded 2 blocks ahead', encoding="utf-8")
    loaded = load_policy(main)
    assert not loaded.errors
    assert loaded.policy.prefetch_offloaded == PrefetchOffloaded(2)
    assert loaded.policy.canonical != found.canonical


@pytest.mark.parametrize(
    "word",
    ["bucket", "prefetch", "delay", "overlap", "keep", "order", "ahead", "within", "flight", "peak", "host", "memory"],
)
def test_what_opens_a_scheduling_line_is_a_name_wherever_one_can_stand(word: str) -> None:
    found = policy(
        f"let {word} = all_gather\nsave mm, {word}\n{word} -> save\n({word}) -> save\nprefetch {word} 1 block ahead"
    )
    assert found.rules[1].selector == found.rules[2].selector == Reference(word)
    assert found.scheduling == (Prefetch(Reference(word), 1),)
    found = policy(f"let {word} = mm\n{word} in layers.{word} -> save\n{word}, mm -> save").rules[0]
    assert found.selector == InModule(Reference(word), f"layers.{word}", False)


def test_what_an_included_file_orders_counts(tmp_path: Path) -> None:
    (tmp_path / "order.apl").write_text("let shards = all_gather\nprefetch shards 1 block ahead", encoding="utf-8")
    main = tmp_path / "main.apl"
    main.write_text('include "order.apl"\nbucket shards per block', encoding="utf-8")
    loaded = load_policy(main)
    assert loaded.diagnostics == (), "a name that a scheduling line alone uses is used"
    assert loaded.policy.scheduling == (Prefetch(Reference("shards"), 1),)
    assert loaded.policy.buckets == (Bucket(Reference("shards"), 1),)
    main.write_text('include "order.apl"\nprefetch shards 2 blocks ahead', encoding="utf-8")
    (found,) = load_policy(main).diagnostics
    earlier = found.related[0].span
    assert (found.code, Path(earlier.source.name).name, earlier.line) == ("APL213", "order.apl", 2)


@pytest.mark.parametrize("word", sorted({*filter(str.isidentifier, keywords()), *ACTIONS, "up", "to", "rank"}))
def test_a_policy_and_a_mesh_dimension_may_be_called_like_a_word_of_the_language(word: str) -> None:
    found = policy(f"policy {word}\nsave mm\nfuse all_gather chains over {word}, dp, {word}")
    assert found.name == word
    assert found.rewrites == (Fuse("all_gather", (word, "dp", word)),)
    assert policy(format_policy(found)) == found
    assert format_source(Source("", f"policy   {word};save mm")).text == f"policy {word}\nsave mm\n"


def test_a_policy_in_a_file_that_is_called_like_a_word_of_the_language_is_written_back(tmp_path: Path) -> None:
    (tmp_path / "fuse.apl").write_text("save mm", encoding="utf-8")
    (tmp_path / "all.apl").write_text('policy save\ninclude "fuse.apl"', encoding="utf-8")
    for name, wanted in (("fuse", "fuse"), ("all", "save")):
        found = load_policy(tmp_path / f"{name}.apl").policy
        assert found.name == wanted
        assert policy(found.canonical).name == wanted


@pytest.mark.parametrize("glob", ["layers.*", "model.layers.*", "transformer.h.*"])
def test_blocks(glob: str) -> None:
    assert policy(f"blocks {glob}\nsave mm in block").blocks == Blocks(glob)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("requires policylang >= 0.2\nsave mm", "save mm"),
        ("save (mm,  # the products\n      bmm\n) in block; ", "save (mm, bmm) in block"),
        ("save mm\r\n\r\nsave bmm\r\n", "save mm\nsave bmm"),
    ],
    ids=["an older language", "parentheses", "line ends"],
)
def test_texts_with_the_same_rules(text: str, same: str) -> None:
    assert policy(text).rules == policy(same).rules


@pytest.mark.parametrize("text", ["offload mm up to 8 GiB per rank", "mm -> offload up  to 8GiB per   rank"])
def test_a_budget_of_what_is_offloaded(text: str) -> None:
    assert rule(text) == Rule(Action.OFFLOAD, MM, budget=Quantity(8 * 2.0**30, "bytes"))


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("save mm as bfloat16", NarrowForm("bfloat16")),
        ("mm -> save as bf16", NarrowForm("bfloat16")),
        ("save mm as half", NarrowForm("float16")),
        ("save mm as float8_e4m3fn per row", NarrowForm("float8_e4m3fn", per_row=True)),
        ("prefer_save mm as float8_e5m2  per  row", NarrowForm("float8_e5m2", per_row=True)),
    ],
)
def test_the_form_of_what_is_saved(text: str, form: NarrowForm) -> None:
    found = rule(text)
    assert found.form == form
    assert found.action.saves
    assert rule(parse_policy(text).policy.canonical.splitlines()[-1]) == found


def test_lossless_is_a_name_elsewhere() -> None:
    for text in (
        "let lossless = mm\nsave lossless",
        "save mm in lossless",
        "let lossless = mm\nexpect every lossless saved",
    ):
        assert not parse_policy(text).diagnostics, text
    policy = parse_policy("save mm\nexpect lossless  # always").policy
    assert policy.expectations == (ExpectLossless(),)
    assert policy.canonical.endswith("expect lossless\n")


def test_the_words_of_a_budget_are_names_elsewhere() -> None:
    assert policylang.parse("let up = mm; let rank = bmm; save up in rank; save rank").rules


@pytest.mark.parametrize(
    "text",
    [
        "let x = mm where (bytes > 3 MiB)",
        "let x = mm where ((is view or is random))",
        "save mm where not (is view)",
        "save mm where (is view) and (bytes > 3 MiB or (is random))",
    ],
)
def test_a_statement_ends_with_its_last_parenthesis(text: str) -> None:
    (statement,) = parse_file(Source("<policy>", f"{text}  # seen\n"))[0].statements
    assert statement.span.text == text
