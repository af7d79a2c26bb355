"""What an editor's own commands ask: the nodes of the rule at the cursor, and the settings that hold."""

from __future__ import annotations

from policylang.editor.actions import nodes_of_rule
from policylang.editor.server import server
from policylang.editor.workspace import SETTINGS

POLICY = """include "shared.apl"
save attention
recompute (
    everything
) in layers.0 except attention
"""


def test_a_line_has_the_nodes_of_its_rule_and_of_no_other(state_of, tmp_path):
    (tmp_path / "shared.apl").write_text("# one\nsave mm, addmm\n")
    state = state_of(POLICY, "vit.graph")
    plan = state.graph.plan
    shared, attention, layer = ([plan.facts.names[row] for row in rule.matched] for rule in plan.rules)
    assert shared
    assert attention
    assert layer
    assert nodes_of_rule(state, 0) == []  # not those of the included file, whose second line this is not
    assert nodes_of_rule(state, 1) == attention
    assert nodes_of_rule(state, 2) == nodes_of_rule(state, 3) == nodes_of_rule(state, 4) == layer
    assert nodes_of_rule(state, 5) == nodes_of_rule(state, 99) == []


def test_without_a_plan_there_are_none(state_of):
    assert nodes_of_rule(state_of("save attention\n"), 0) == []
    assert nodes_of_rule(state_of("save attenton\n", "vit.graph"), 0) == []


def test_a_client_is_told_which_settings_hold(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.policylang]\ngraph = "a.graph"\ndevice = "h100-sxm"\n')
    in_use = server().protocol.fm.commands[SETTINGS]
    found = in_use((tmp_path / "mine.apl").as_uri())
    assert found == {"graph": str(tmp_path / "a.graph"), "path": None, "device": "h100-sxm"}
    assert in_use((tmp_path.parent / "mine.apl").as_uri()) == {"graph": None, "path": None, "device": None}
