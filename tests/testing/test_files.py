"""Policy tests: what passes, what fails, what a failure says, and the fenced blocks of a Markdown file."""

from pathlib import Path

import pytest

from policylang.graph import snapshot
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source, Span
from policylang.report.diagnostics import render_text
from policylang.testing.suites import fences, lifted, lowered, run_files

GRAPH = """\
%x = input
%w = parameter
%a = aten.mm.default(%x, %w) layers.0 bytes=8
%b = aten.sin.default(%a) layers.0 bytes=8
%c = aten.mm.default(%b, %w) layers.1 bytes=16
---
%d = aten.cos.default(%a, %b, %c)
"""


def page(policy: str, info: str = "", graph: str = f"```graph\n{GRAPH}```\n") -> str:
    return f"# Test\n\n{graph}\n```apl{info}\n{policy}\n```\n"


def run(folder: Path, text: str, **more: list[str]):
    (folder / "test.md").write_text(text)
    return run_files([str(folder / "test.md")], **more)


def said(result) -> list[tuple[str, int, str]]:
    """Of each diagnostic its code, its line and the text that it underlines."""
    return [(each.code, each.span.line, each.span.text) for each in result.found.diagnostics]


@pytest.mark.parametrize(
    "policy",
    [
        "save mm  # matches: a, c", "save mm  # matches: c, a; decides: 2",
        "save mm  # the order of names does not count; matches: a, c", "optional save bmm  # matches: nothing",
        "save bmm  # error: APL301", "save everything; save mm  # matches: a, c",
        "recompute mm  # decides: c\nsave mm in layers.0  # decides: a", "let some = mm where bytes > 8  # matches: c",
        "let some = mm  # warning: APL110\nsave mm", "save everything\n# saved: a, b, c\n# recomputed: nothing",
        "save mm\nrecompute sin\n# saved: 2\n# recomputed: b", "save (  # matches: b\n    sin\n)",
        "save (\n    sin\n)  # matches: b", "save bmm\n# error: APL301",
        "save mmm  # error: APL101\nsave mm or  # error: APL011",
        "save mm\nsave mm in layers.0  # matches: a; decides: a\n# a word: of prose",
        "blocks layers.*\nexpect exactly 1 mm per block\nexpect every mm saved  # error: APL305\nrecompute mm",
        "recompute mm  # warning: APL303\nsave mm", "include <save_all>\n# saved: 3",
    ],
)  # fmt: skip
def test_policies_that_are_as_they_claim(tmp_path, policy):
    result = run(tmp_path, page(policy))
    assert result.found.diagnostics == (), render_text(result.found.diagnostics)
    assert (result.files, result.policies) == (1, 1)
    assert result.claims >= 1 or "expect" in policy


@pytest.mark.parametrize(
    ("policy", "code", "underlined"),
    [
        ("save mm  # matches: a", "APL510", "matches: a"),
        ("save mm  # matches: a, b, c", "APL510", "matches: a, b, c"),
        ("save mm  # matches: nothing", "APL510", "matches: nothing"),
        ("save mm  # matches: 3", "APL510", "matches: 3"),
        ("save mm  # matches: a, c; decides: a", "APL510", "decides: a"), ("save mm\n# saved: a", "APL510", "saved: a"),
        ("save mm\nrecompute sin\n# recomputed: nothing", "APL510", "recomputed: nothing"),
        ("let some = mm  # matches: a", "APL510", "matches: a"),
        ("blocks layers.*  # matches: a\nsave mm", "APL510", "matches: a"), ("save bmm", "APL301", "bmm"),
        ("save mm  # error: APL301", "APL511", "error: APL301"), ("save bmm  # warning: APL301", "APL301", "bmm"),
        ("recompute mm\nsave mm", "APL303", "recompute mm"),
        ("save mm\nsave bmm  # error: APL301, APL302", "APL511", "error: APL301, APL302"),
        ("save mm  # matchs: a", "APL512", "matchs: a"), ("save mm  # matches: a c", "APL512", "matches: a c"),
        ("save mm  # error APL301", "APL512", "error APL301"), ("save mm  # error: all", "APL512", "error: all"),
        ("save mm  # error: APL999", "APL512", "error: APL999"), ("save mm\n# matches: a", "APL512", "matches: a"),
        ("save mm  # saved: a", "APL512", "saved: a"), ("save mm or", "APL011", ""),
    ],
)  # fmt: skip
def test_policies_that_are_not(tmp_path, policy, code, underlined):
    found = said(run(tmp_path, page(policy)))
    lines = page(policy).splitlines()
    assert (code, underlined) in [(code, text) for code, _, text in found]
    assert all(text.strip() in lines[line - 1] for _, line, text in found)


def test_what_a_failure_says(tmp_path):
    (found,) = run(tmp_path, page("save mm  # matches: a, b, e")).found.diagnostics
    assert found.message == "it matches `a`, `c`"
    assert found.details == ("not among them: `b`, `e`", "not expected: `c`", "the graph has no node `e`")
    assert found.span.source.name == str(tmp_path / "test.md")


NAMED, FLAT = f"```graph two\n{GRAPH}```\n", f"```graph flat\n{GRAPH}```\n"
AUTO, BUCKET = "recompute sin\nundecided -> auto\n# saved: ", "bucket all_gather up to 2 GiB"
ALLOWED = page("recompute mm\nsave mm  # decides: 2", " graph=two allow=APL303,APL309", NAMED)
UNREADABLE = page("save mm  # matches: a, c\nsave bmm # error: APL301", graph="```graph\n%x = inpt\n```\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # without a graph a policy is read and no more; one without a name is for its section, one with for who names it
        (page("save bmm", graph=""), []), (page("save bmm  # matches: a", graph=""), [("APL513", 5, "matches: a")]),
        (page("save mm  # matches: 2") + "\n## Another\n\n```apl\nsave bmm\n```\n", []),
        (page("save mm  # matches: 2", " graph=two", "") + f"\n{NAMED}", []),
        (page("save mm  # matches: a, c", " graph=small.graph", ""), [("APL355", 4, "small.graph")]),
        # one that cannot be read is said once, and nothing follows
        (UNREADABLE, [("APL503", 4, "inpt")]),
        # a flat graph is planned as one, and in eager no min-cut decides what no rule does, nor orders collectives
        (page("undecided -> auto\n# saved: 0"), []), (page("undecided -> auto\n# saved: a, b, c", graph=FLAT), []),
        (page(f"{AUTO}nothing"), []), (page(f"{AUTO}b", " path=eager"), []), (page(BUCKET, graph=""), []),
        (page(BUCKET, " path=eager"), [("APL306", 14, BUCKET)]),
        (page(BUCKET, " path=eager", ""), [("APL306", 5, BUCKET)]),
        # an allowed code needs no claim, an ignored policy is not tested
        (ALLOWED, []), (page("save mmm", " ignore"), []),
    ],
)  # fmt: skip
def test_which_graph_and_path_a_policy_is_planned_for(tmp_path, text, found):
    assert said(run(tmp_path, text)) == found


def test_what_is_wrong_around_a_policy(tmp_path):
    (wrong,) = run(tmp_path, page("save mm", " path=eagre")).found.diagnostics
    assert (wrong.code, wrong.help) == ("APL504", "did you mean `path=eager`?")
    unknown = said(run(tmp_path, ALLOWED.replace("APL303", "APL999")))
    assert ("APL504", "allow=APL999,APL309") in {(code, text) for code, _, text in unknown}
    assert [each.code for each in run(tmp_path, "# Nothing\n").found.diagnostics] == ["APL515"]
    assert run(tmp_path, page("save mmm", " ignore")).policies == 0


def test_a_snapshot_beside_the_file(tmp_path):
    facts, _ = read_graph(Source("graph", GRAPH))
    snapshot.write(facts, tmp_path / "small.graph")
    assert run(tmp_path, page("save mm  # matches: a, c", " graph=small.graph", graph="")).found.diagnostics == ()


@pytest.mark.parametrize(
    ("info", "underlined"),
    [(" graph=twoo", "twoo"), (" grap=two", "grap=two"), (" ignor", "ignor"), (" graph=two graph=two", "graph=two")],
)
def test_words_behind_a_fence_that_say_nothing(tmp_path, info, underlined):
    text = page("save mm  # matches: a, c", info, graph=f"```graph two\n{GRAPH}```\n")
    codes = {(code, text) for code, _, text in said(run(tmp_path, text))}
    assert ("APL504", underlined) in codes


def test_an_error_of_an_included_file_belongs_to_its_include(tmp_path):
    (tmp_path / "other.apl").write_text("save bmm\n")
    assert run(tmp_path, page('include "other.apl"  # error: APL301')).found.diagnostics == ()
    (found,) = run(tmp_path, page('include "other.apl"')).found.diagnostics
    assert found.span.source.name.endswith("other.apl")


@pytest.mark.parametrize(
    ("policy", "cover", "rules", "missing"),
    [
        ('include "mine.apl"\n# saved: 2', "mine.apl", 3, [("APL514", "optional save bmm")]),
        ("save mm", ".", 3, [("APL514", each) for each in ("save mm", "optional save bmm", "recompute sin")]),
        ("include <save_all>", "save_all", 1, []),
        ('include "order.apl"', "order.apl", 2, [("APL514", "optional delay reduce_scatter 1 block")]),
    ],
    ids=["once it matches", "not if nothing includes it", "of a bundled policy by its name", "a scheduling line"],
)
def test_a_rule_is_covered_once_it_matches(tmp_path, policy, cover, rules, missing):
    mine = "save mm\noptional save bmm\nrecompute sin\n"
    name, text = ("order.apl", ORDER) if "order" in policy else ("mine.apl", mine)
    (tmp_path / name).write_text(text)
    graph = {"graph": steps()} if "order" in policy else {}
    result = run(tmp_path, page(policy, **graph), cover=[cover if cover == "save_all" else str(tmp_path / cover)])
    assert result.rules == rules
    assert [(code, text) for code, _, text in said(result)] == missing


ORDER = "prefetch all_gather 1 block ahead\noptional delay reduce_scatter 1 block\n"


def test_coverage_of_a_file_that_is_not_there(tmp_path):
    result = run(tmp_path, page("save mm"), cover=["nowhere.apl"])
    assert [each.code for each in result.found.diagnostics] == ["APL103"]
    assert result.found.unreadable


def steps(count: int = 3) -> str:
    """Layers that gather a weight each and multiply by it."""
    gather, wait = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"
    lines = ["%x0 = input", *(f"%w{n} = parameter" for n in range(count))]
    for n in range(count):
        lines += [
            f"%gather{n} = {gather}(%w{n}) layers.{n} collective group=dp:4 bytes=64",
            f"%wait{n} = {wait}(%gather{n}) layers.{n} bytes=64",
            f"%x{n + 1} = aten.mm.default(%x{n}, %wait{n}) layers.{n} bytes=64",
        ]
    lines += ["---", "%t = tangent", f"%g = aten.mul.Tensor(%t, %x1, %x{count})", f"output(%x{count}, %g)"]
    return "\n".join(["```graph", *lines, "```", ""])


def test_claims_about_scheduling_lines(tmp_path):
    lines = (
        "prefetch all_gather 1 block ahead  # matches: gather0, gather1, gather2; moves: gather1, gather2",
        "optional delay reduce_scatter 1 block  # matches: nothing; moves: 0",
        "keep order of all_to_all  # error: APL301",
    )
    result = run(tmp_path, page("\n".join(lines), graph=steps()))
    assert said(result) == []
    assert result.claims == 5
    wrong = "prefetch all_gather 1 block ahead  # matches: gather1; moves: gather0, gather9"
    found = run(tmp_path, page(wrong, graph=steps())).found.diagnostics
    assert [each.message for each in found] == [
        "it matches `gather0`, `gather1`, `gather2`",
        "it moves `gather1`, `gather2`",
    ]
    assert found[1].details[-1] == "the graph has no node `gather9`"
    for line, message in (
        ("prefetch all_gather 1 block ahead  # decides: gather1", "`decides:` is about no rule"),
        ("save mm  # moves: x1", "`moves:` is about no scheduling line"),
    ):
        (other,) = run(tmp_path, page(line, graph=steps())).found.diagnostics
        assert (other.code, other.message) == ("APL510", message)


PAGE = """# One

```apl graph=two
save mm
```

~~~ apl
save bmm
```
~~~

## Two

  ````markdown
  ```apl
  save addmm
  ```
  ````
```not `a` fence```
```apl
save add"""


def test_blocks_with_their_words_sections_and_lines():
    blocks = fences(Source("page.md", PAGE))
    assert [(each.section, each.language, each.text) for each in blocks] == [
        (1, "apl", "save mm\n"),
        (1, "apl", "save bmm\n```\n"),
        (2, "markdown", "  ```apl\n  save addmm\n  ```\n"),
        (2, "apl", "save add"),
    ]
    assert [word.text for word in blocks[0].words] == ["apl", "graph=two"]
    for fence in blocks:
        source = lifted(fence)
        start = source.text.index(fence.text[0:6])
        span = Span(source, start, start + 6)
        back = lowered(span, fence, source)
        assert back.text == span.text
        assert (back.line, back.column) == (span.line, span.column)


def test_line_ends_of_another_system():
    (fence,) = fences(Source("page.md", "```apl\r\nsave mm\r\n```\r\n"))
    assert (fence.language, fence.text) == ("apl", "save mm\r\n")


def test_a_policy_with_a_schedule_is_planned_as_its_pipeline(tmp_path):
    schedule = "blocks layers.*\nschedule gpipe into {} stages of 2 microbatches\n"
    stages = "save mm in stage 0  # matches: a\nsave mm in last stage  # matches: c"
    assert said(run(tmp_path, page(schedule.format(2) + stages))) == []
    found = said(run(tmp_path, page(schedule.format(3) + "save mm")))
    assert [(code, text) for code, _, text in found] == [("APL657", "schedule gpipe into 3 stages of 2 microbatches")]
    assert "APL656" in [code for code, _, _ in said(run(tmp_path, page("save mm in stage 0")))]
