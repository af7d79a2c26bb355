"""The page of a plan, opened and used in a real browser; and what its data may hold without becoming markup."""

import json
import re

import pytest

from policylang.graph.facts import GraphKind
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.language.loader import parse_policy
from policylang.language.syntax import Policy
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.worth import worth_of_rules
from policylang.planning.planner import plan
from policylang.report.plan_page import memory_chart, plan_page
from policylang.simulation.memory import Peak
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


def parsed(policy: str) -> Policy:
    loaded = parse_policy(policy, name="</style><img src=x>.apl")
    assert loaded.policy is not None, loaded.diagnostics
    return loaded.policy


SLOW = DeviceProfile("slow", compute={"float16": Rate.constant(1e6)}, bandwidth=Rate.constant(1e6))
"""A product takes a millisecond."""


def page(
    layers: int = 4,
    policy: str = POLICY,
    name: str = "a.graph",
    path: Capabilities = JOINT,
    device: DeviceProfile | None = None,
) -> str:
    facts = facts_of(graph(layers), GraphKind.FLAT if path is FLAT else None)
    made = plan(parsed(policy), facts, path, device=device)
    return plan_page(breakdown(made), worth_of_rules(made, path), name)


def data_of(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


def test_nothing_of_a_policy_or_a_name_is_markup():
    text = page(name="<i>&\u2028.graph")
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "\u2028" not in text.partition("<script")[2]
    assert "<img" not in text
    assert "<i>&" not in text
    data = data_of(text)
    assert data["graph"] == "<i>&�.graph"
    assert data["sources"][0]["lines"][0].startswith("# a policy of several lines </script>")


def test_nothing_is_loaded_from_anywhere():
    text = page().replace("http://www.w3.org/2000/svg", "")  # the name of a language, not an address that is asked
    shell = re.sub(r'<title>.*?</title>|<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|//cdn|@import|<[^>]*\bsrc=|url\(", shell)
    assert "default-src 'none'" in shell


def test_the_figures_of_the_page_are_those_of_the_breakdown():
    found = breakdown(plan(parsed(POLICY), facts_of(graph(4)), JOINT))
    assert found.under.amounts.saved_bytes == 4 * 400  # the first product of each layer
    for curve, side in zip(data_of(page())["memory"]["curves"], (found.under, found.without), strict=True):
        assert max(curve["moments"]) == side.peak.bytes


def without_scripts(text: str) -> str:
    """What of a page is there without a script."""
    return re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)


def test_the_essentials_need_no_script():
    text = without_scripts(page())
    for said in ("kept for the backward", "1.6 KiB", "layers.0–2", "aten.silu.default", "simulated peak"):
        assert said in text
    (chart,) = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert '<title id="chart-title">Memory over the step</title>' in chart
    assert "peak under the policy: 4.3 KiB at " in chart
    assert re.search(r'aria-labelledby="chart-title chart-desc"', chart)
    assert "alive at the peak, 4.3 KiB: at " in text
    assert "&lt;/style&gt;&lt;img src=x&gt;.apl:4" in text  # the line that decided a value that is alive at the peak
    assert "does\n    not run here" in text


EMPTY = ["output()", "%x = input bytes=10\noutput(%x)", "%x = input\n%a = aten.sin.default(%x)\noutput(%a)"]


@pytest.mark.parametrize("text", EMPTY)
def test_a_graph_with_next_to_nothing_in_it(text):
    made = plan(parsed("undecided -> save"), facts_of(text), JOINT)
    written = plan_page(breakdown(made), (), "empty.graph")
    assert "<h1>" in written


def test_a_curve_of_many_moments_keeps_its_peaks():
    moments = [0] * 5000
    moments[1234] = moments[4999] = 1000
    sides = [{"name": "a", "moments": moments}, {"name": "b", "moments": [1] * 5000}]
    memory = {"curves": sides, "backward": [0] * 2500 + [1] * 2500, "resident": 0, "host": []}
    drawn = memory_chart(memory, [Peak(1000, 1000, "x"), Peak(1, 1, "y")])
    (edge,) = re.findall(r'class="first edge" d="M(.*?)"', drawn)
    points = [tuple(map(float, point.split(","))) for point in edge.split("L")]
    top = min(y for _, y in points)
    assert [x for x, y in points if y == top] == [246.9, 999.9, 1000]
    assert len(points) <= 1002


def luminance(color: str) -> float:
    """Relative luminance as in WCAG 2."""
    digits = color if len(color) == 6 else "".join(2 * digit for digit in color)
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("dark", [False, True])
def test_words_and_lines_stand_out_from_what_they_are_on(dark: bool):
    light, _, night = page().partition("prefers-color-scheme: dark")
    colors = dict(re.findall(r"--([a-z]+): #([0-9a-f]{3,6})\b", night if dark else light))
    words = {"ink", "soft", "saved", "open", "recomputed", "offloaded"}
    for name in (*words, "without"):
        for ground in ("ground", "card", "hover", "chosen"):
            low, high = sorted(luminance(colors[each]) for each in (name, ground))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if name in words else 3), (name, ground)


WORDS = """
    const boxes = [...document.querySelectorAll(".ticks span, .parts span, .legend > span")]
        .filter((each) => each.textContent).map((each) => each.getBoundingClientRect());
    const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    return boxes.flatMap((a, at) => boxes.slice(at + 1).filter((b) => over(a, b))).length
        + boxes.filter((box) => box.left < 0 || box.right > innerWidth || box.height < 10).length;
"""


@in_browser
@pytest.mark.parametrize("width", [600, pytest.param(1400, marks=pytest.mark.slow)])
def test_the_chart_can_be_read_at_any_width(width: int, tmp_path):
    (tmp_path / "plan.html").write_text(page(), encoding="utf-8")
    with browser(width) as it:
        it.open(tmp_path / "plan.html")
        assert it.run("return innerWidth") == width
        assert it.run("return document.documentElement.scrollWidth") <= width
        assert it.run(WORDS) == 0
        size = "return [...document.querySelectorAll('.plot span')].map((each) => getComputedStyle(each).fontSize)"
        assert set(it.run(size)) == {"12px"}
        it.type("#memory svg", KEYS["end"])
        (told,) = it.texts(".told")
        assert told.startswith("g0: ")
        assert it.run("return document.querySelector('#memory svg').getAttribute('aria-valuetext')") == told
        assert it.errors() == []


@in_browser
def test_the_page_in_a_browser(tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(page(device=SLOW), encoding="utf-8")
    with browser() as it:
        it.open(path)
        assert it.errors() == []
        assert it.texts("#head span")[3:] == ["bytes", "FLOPs", "time"]
        assert it.run("return document.title").endswith(" on a.graph")
        assert it.texts("h1") == it.run("return [document.title]")
        assert len(it.texts("#memory path")) == 4  # an area and an edge each
        assert it.texts("#blocks .label") == ["layers.0–2×3", "layers.3"]

        # a rule → its nodes
        it.click('button.line[data-rule="2"]')
        assert it.texts("#list .mono") == ["down0", "down1", "down2", "down3"]
        assert "decides 4" in it.texts("#chosen")[0]

        # a node → its rules
        it.click('.value[data-name="down2"]')
        assert it.texts("#detail h3") == ["down2"]
        assert it.texts("#detail p")[0].endswith("1 KFLOP · 1 ms on slow · in layers.2.mlp.down")
        title = "return document.querySelector('.value[data-name=\"down2\"]').title"
        assert it.run(title).endswith("; one run takes 1 ms on slow")
        assert it.texts('.value[data-name="down2"] .number') == ["100 B", "1 KFLOP", "1 ms"]
        notes = it.run("return [...document.querySelectorAll('.note')].map((each) => each.title).join()")
        assert re.search(r"[+−]\d\S* KFLOP recomputed in [+−]\d\S* ms, ", notes)
        assert it.texts("#detail li span") == ["overridden by line 5", "overridden by line 5", "decides"]
        assert len(it.texts(".rule.deciding .line")) == 1
        line = it.run("return document.querySelector('.rule.deciding .line').textContent")
        assert line.startswith("recompute every 2nd")
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
        assert "aten.silu.default" in it.texts("#blocks td")
        it.type("#memory svg", KEYS["end"])
        assert it.texts(".told")[0].startswith("g0: ")
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
