"""The page of a plan, opened and used in a real browser; and what its data may hold without becoming markup."""

from __future__ import annotations

import json
import re

import pytest

from policylang.graph.facts import GraphKind
from policylang.language.resolution.loader import parse_policy
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.marginal_cost import worth_of_rules
from policylang.planning.planner import plan
from policylang.report.plan.html import plan_page
from tests.support.browser import KEYS, MISSING, browser
from tests.support.textgraph import facts_of

in_browser = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

LAYER = """
    %norm{n} = aten.rms_norm.default(%x{n}) layers.{n}.norm bytes=100 shape=5x10 dtype=float16
    %mm{n} = aten.mm.default(%norm{n}, %w{n}) layers.{n}.mlp.up bytes=400 flops=1000 shape=20x10 dtype=float16
    %act{n} = aten.silu.default(%mm{n}) layers.{n}.mlp bytes=400 shape=20x10 dtype=float16
    %down{n} = aten.mm.default(%act{n}, %v{n}) layers.{n}.mlp.down bytes=100 flops=1000 shape=5x10 dtype=float16
    %x{after} = aten.add.Tensor(%x{n}, %down{n}) layers.{n} bytes=100 shape=5x10 dtype=float16
"""
BACKWARD = """
    %g{n} = aten.mul.Tensor(%g{after}, %act{n}, %mm{n}, %norm{n}, %x{n}) bytes=100
"""
POLICY = """# a policy of several lines </script><script>document.title = "taken"</script>
blocks layers.*
recompute everything in block
save mm in block     # \u2028 and <b>bold</b> & more
recompute every 2nd mm per block
expect saved <= 1 GiB
"""


def graph(layers: int) -> str:
    lines = ["%x0 = input bytes=100"]
    lines += [f"%{name}{n} = parameter bytes=50" for n in range(layers) for name in "wv"]
    lines += [LAYER.format(n=n, after=n + 1) for n in range(layers)]
    lines += ["---", f"%g{layers} = tangent bytes=100"]
    lines += [BACKWARD.format(n=n, after=n + 1) for n in reversed(range(layers))]
    return "\n".join([*lines, f"output(%x{layers}, %g0)"])


def page(layers: int = 4, policy: str = POLICY, name: str = "a.graph", path: Capabilities = JOINT) -> str:
    loaded = parse_policy(policy, name="</style><img src=x>.apl")
    assert loaded.policy is not None, loaded.diagnostics
    made = plan(loaded.policy, facts_of(graph(layers), GraphKind.FLAT if path is FLAT else None), path)
    return plan_page(breakdown(made), worth_of_rules(made, path), name)


def data_of(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


def test_nothing_of_a_policy_or_a_name_is_markup():
    text = page(name="<i>&\u2028.graph")
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "\u2028" not in text.partition("<body>")[2]
    assert "<img" not in text
    assert "<i>&" not in text
    data = data_of(text)
    assert data["graph"] == "<i>&\u2028.graph"
    assert data["sources"][0]["lines"][0].startswith("# a policy of several lines </script>")


def test_nothing_is_loaded_from_anywhere():
    text = page().replace("http://www.w3.org/2000/svg", "")  # the name of a language, not an address that is asked
    shell = re.sub(r'<title>.*?</title>|<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|//cdn|@import|src=|url\(", shell)
    assert "default-src 'none'" in shell


def test_the_figures_of_the_page_are_those_of_the_breakdown():
    data = data_of(page())
    assert data["under"]["amounts"]["saved_bytes"] == 4 * 400  # the first product of each layer
    assert [group["label"] for group in data["groups"]] == ["layers.0–2", "layers.3"]  # nothing reads the last sum
    assert max(data["memory"]["under"]) == max(data["under"]["peak"]["forward"], data["under"]["peak"]["backward"])
    assert max(data["memory"]["without"]) == max(
        data["without"]["peak"]["forward"], data["without"]["peak"]["backward"]
    )


@in_browser
def test_the_page_in_a_browser(tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(page(), encoding="utf-8")
    with browser() as it:
        it.open(path)
        assert it.errors() == []
        assert it.run("return document.title").endswith(" on a.graph")
        assert it.texts("h1") == it.run("return [document.title]")
        assert len(it.texts("#memory path")) == 2
        assert it.texts("#blocks .label") == ["layers.0–2×3", "layers.3"]

        # a rule → its nodes
        it.click('button.line[data-rule="2"]')
        assert it.texts("#list .mono") == ["down0", "down1", "down2", "down3"]
        assert "decides 4" in it.texts("#chosen")[0]

        # a node → its rules
        it.click('.value[data-name="down2"]')
        assert it.texts("#detail h3") == ["down2"]
        assert it.texts("#detail li span") == ["overridden by line 5", "overridden by line 5", "decides"]
        assert len(it.texts(".rule.deciding .line")) == 1
        assert it.run("return document.querySelector('.rule.deciding .line').textContent").startswith(
            "recompute every 2nd"
        )
        assert it.run("return document.querySelectorAll('.rule.matching').length") == 3

        # on from there: another rule by the node's list, then everything again
        it.click('#detail button[data-rule="1"]')
        assert it.run("return document.querySelectorAll('#list .value').length") == 8
        assert it.run("return document.querySelectorAll('#list .value.lost').length") == 4
        it.type("#list", KEYS["down"] + KEYS["down"])
        assert it.texts("#detail h3") == ["down0"]
        it.type("#list", KEYS["escape"])
        assert it.texts("#chosen") == ["20 values of 20"]
        it.type("#search", "silu")
        assert it.texts("#list .mono") == ["act0", "act1", "act2", "act3"]

        it.click("#blocks summary")
        it.wait_for("#blocks td")
        assert "aten.silu.default" in it.texts("#blocks td")
        it.type("#memory svg", KEYS["end"])
        assert it.texts(".told")[0].startswith("g0: ")
        assert it.errors() == []
        assert it.screenshot().startswith(b"\x89PNG")


@in_browser
@pytest.mark.parametrize("action", ["offload", "save"])
def test_what_is_moved_to_the_host_has_a_figure_of_its_own(action: str, tmp_path):
    """The first product of each of four layers: the backward reads no other."""
    path = tmp_path / "plan.html"
    path.write_text(page(policy=f"blocks layers.*\n{action} mm in block", path=FLAT), encoding="utf-8")
    told = "offloaded1.6 KiB4 values on the host between forward and backward, beside what is kept"
    with browser() as it:
        it.open(path)
        assert [text for text in it.texts("#tiles div") if "offloaded" in text] == [told] * (action == "offload")
        assert ("400 B offloaded" in it.texts("#blocks summary")[0]) is (action == "offload")
        assert it.errors() == []


@in_browser
def test_twenty_thousand_values_are_a_few_rows_in_the_page(tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(page(4000), encoding="utf-8")
    with browser() as it:
        it.open(path)
        assert it.texts("#chosen") == ["20,000 values of 20,000"]
        assert it.run("return document.querySelectorAll('*').length") < 2000
        it.type("#list", KEYS["end"])
        assert it.texts("#detail h3") == ["x4000"]
        assert "x4000" in it.texts("#list .mono")
        assert it.errors() == []
