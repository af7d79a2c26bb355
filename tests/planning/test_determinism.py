"""The same policy on the same graph is the same plan, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from attrs import evolve

import policylang
from policylang.planning.planner import plan
from tests.planning.strategies import JOINT, planned
from tests.support.textgraph import facts_of

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
import sys

from policylang.language.loader import parse_policy
from policylang.planning.planner import plan
from tests.planning.strategies import JOINT
from tests.support.textgraph import facts_of

text = "%x = input\\n%w = parameter\\n"
last = "x"
for layer in range(3):
    text += f"%g{layer} = _c10d_functional.all_gather_into_tensor.default(%w) layers.{layer} collective group=dp:4\\n"
    text += f"%w{layer} = _c10d_functional.wait_tensor.default(%g{layer}) layers.{layer}\\n"
    for step in range(4):
        text += f"%mm{layer}_{step} = aten.mm.default(%{last}, %w{layer}) layers.{layer}.attn bytes=8\\n"
        last = f"mm{layer}_{step}"
text += "---\\n%t = tangent\\n%b = aten.mul.Tensor(%t, %mm0_0, %mm2_3, %w1)\\noutput(%" + last + ", %b)"
policy = parse_policy('''
recompute everything in block
save matmul or attention or compute in block
recompute every 2nd mm per block
must_recompute chain through all_gather where from parameter
optional save (view, cast, pointwise) in layers.{0,2}
expect saved per block <= 1 B
''').policy
made = plan(policy, facts_of(text), JOINT)
print(made.digest)
print([outcome.matched for outcome in made.rules])
print([(found.code, found.message, found.details) for found in made.diagnostics])
from policylang.planning import capabilities
from tests.planning.strategies import sharded_step

ordered = parse_policy('''
recompute (cast, all_gather) in block
keep order of (reduce_scatter in layers.1)
prefetch all_gather 1 block ahead
delay reduce_scatter 2 blocks
prefetch (all_gather in nowhere) 3 blocks ahead
''').policy
made = plan(ordered, sharded_step(blocks=4, regathers=True, unknown=2, head=True), capabilities.JOINT)
print(made.digest)
print(list(made.order.schedule), list(made.order.words()))
print([(each.matched, each.moved, dict(each.left)) for each in made.order.outcomes], made.order.barriers)
print([(found.code, found.message, found.details) for found in made.diagnostics])
print("torch" in sys.modules)
"""


def run(seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hash_seeds_do_not_reach_a_plan_and_torch_is_not_imported():
    outputs = {run(seed) for seed in (0, 12345)}
    assert len(outputs) == 1
    digest, *_, torch = outputs.pop().splitlines()
    assert len(digest) == 64
    assert torch == "False"


GRAPH = "%x = input\n%mm = aten.mm.default(%x)\n%sin = aten.sin.default(%mm)\n---\n%b = aten.mul.Tensor(%sin)"


def test_equal_plans_have_equal_digests():
    first = planned(facts_of(GRAPH), "recompute everything; save mm")
    second = planned(facts_of(GRAPH), "recompute everything; save mm")
    assert first.digest == second.digest


def test_a_digest_covers_names_operators_decisions_and_the_policy():
    digests = [
        planned(facts_of(GRAPH), "recompute everything; save mm").digest,
        planned(facts_of(GRAPH), "recompute everything; prefer_save mm").digest,
        planned(facts_of(GRAPH), "recompute everything; save aten.mm").digest,
        planned(facts_of(GRAPH.replace("%sin", "%sine")), "recompute everything; save mm").digest,
        planned(facts_of(GRAPH.replace("aten.sin", "aten.cos")), "recompute everything; save mm").digest,
        planned(facts_of(GRAPH), "recompute everything; save mm; undecided -> save").digest,
    ]
    assert len(set(digests)) == len(digests)


def test_a_digest_is_of_the_canonical_text_where_there_is_one():
    policy = policylang.parse("recompute everything")
    facts = facts_of(GRAPH)
    one, other = (plan(evolve(policy, canonical=text), facts, JOINT).digest for text in ("a", "b"))
    assert one != other
