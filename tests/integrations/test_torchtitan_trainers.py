"""Inside TorchTitan's real trainers: what its own policies compute and what ours do, step by step and bit by bit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve

from tests.support.titan import graph_trainer
from tests.support.titan_trainer import Outcome, Setting, trained

pytestmark = pytest.mark.slow
GRAPH = {"default": "torchtitan_default", "full": "torchtitan_graph_full", "eager": "torchtitan_eager"}
EAGER = {"selective": "torchtitan_op_sac", "full": "torchtitan_full"}


@pytest.fixture(autouse=True)
def _installed() -> None:
    graph_trainer("trainer")


def assert_same_training(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.losses) == 2
        assert mine.losses == other.losses
        assert mine.weights == other.weights


@pytest.mark.parametrize("theirs", GRAPH)
def test_the_graph_trainer_runs_the_same_nodes_again(theirs: str) -> None:
    ours, own = trained(Setting(policy=GRAPH[theirs])), trained(Setting(theirs=theirs))
    assert_same_training(ours, own)
    assert ours[0].audit is True
    assert ours[0].reported == len(ours[0].recomputed) > 100
    assert sorted(ours[0].recomputed) == sorted(own[0].recomputed)
    assert ours[0].ran == own[0].ran
    assert ours[0].ran["aten::mm"] > 50


@pytest.mark.parametrize(("model", "routers"), [("deepseek_v3", 1), ("qwen3_moe", 2)])
def test_experts_in_the_graph_trainer_are_chosen_once(model: str, routers: int) -> None:
    """Under ``full`` TorchTitan chooses a second time: the biased scores, the top ones, their places."""
    ours, own = trained(Setting(model=model, policy=GRAPH["full"])), trained(Setting(model=model, theirs="full"))
    assert_same_training(ours, own)
    assert ours[0].audit is True
    assert set(ours[0].recomputed) < set(own[0].recomputed)
    assert len(own[0].recomputed) - len(ours[0].recomputed) == 3 * routers
    assert ours[0].ran == {**own[0].ran, "aten::topk": routers}
    assert own[0].ran["aten::topk"] == 2 * routers


def test_a_mixture_of_experts_under_the_default_memory_policy() -> None:
    ours = trained(Setting(model="deepseek_v3", policy=GRAPH["default"]))
    own = trained(Setting(model="deepseek_v3", theirs="default"))
    assert_same_training(ours, own)
    assert ours[0].audit is True
    assert sorted(ours[0].recomputed) == sorted(own[0].recomputed)


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_the_policy_to_try_first_trains_as_no_policy_does(model: str) -> None:
    ours = trained(Setting(model=model, policy="llama3_sac"))
    assert_same_training(ours, trained(Setting(trainer="eager", model=model)))
    assert ours[0].audit is True


def file_of(tmp_path: Path, *included: str) -> str:
    path = tmp_path / "mine.apl"
    path.write_text("".join(f"include <{name}>\n" for name in included))
    return str(path)


@pytest.mark.parametrize(
    ("reshard", "included", "gathers"),
    [("default", (), 6), ("never", ("fsdp_reshard_never",), 4), ("default", ("fsdp_reshard_always",), 7)],
    ids=["as it is", "never", "always"],
)
def test_two_ranks_gather_as_often(reshard: str, included: tuple[str, ...], gathers: int, tmp_path: Path) -> None:
    """Of four gathers, after TorchTitan put those of a layer together. It has no policy that gathers the head again."""
    policy = file_of(tmp_path, GRAPH["default"], *included)
    ours = trained(Setting(policy=policy), 2)
    own = trained(Setting(theirs="default", reshard=reshard), 2)
    assert_same_training(ours, own)
    assert ours[0].weights != ours[1].weights
    assert [outcome.audit for outcome in ours] == [True, True]
    assert [outcome.gathers for outcome in ours] == [gathers, gathers]
    if included != ("fsdp_reshard_always",):
        assert [outcome.gathers for outcome in own] == [gathers, gathers]
        assert sorted(ours[0].recomputed) == sorted(own[0].recomputed)
        assert ours[0].ran == own[0].ran


def test_experts_on_two_ranks() -> None:
    """In bfloat16: with weights in float32, TorchTitan's experts mix the two there, whatever the policy."""
    ours = trained(Setting(model="deepseek_v3", policy=GRAPH["default"], precision="bfloat16"), 2)
    own = trained(Setting(model="deepseek_v3", theirs="default", precision="bfloat16"), 2)
    assert_same_training(ours, own)
    assert [outcome.audit for outcome in ours] == [True, True]
    assert [outcome.gathers for outcome in ours] == [outcome.gathers for outcome in own]
    assert sorted(ours[0].recomputed) == sorted(own[0].recomputed)


EVERYWHERE = (
    *("llama3_sac", "every_2nd_layer", "memory_staged", "save_all", "torchtitan_op_sac", "torchtitan_full"),
    *("torchtitan_graph_full", "moe", "fsdp", "offload"),
)
ON_GRAPHS = (
    *("torchtitan_default", "torchtitan_eager", "fsdp_reshard_never", "fsdp_overlap", "fsdp_tp_overlap", "prelude"),
)
COMMUNICATES_AGAIN = ("every_2nd_layer", "memory_staged", "torchtitan_full", "torchtitan_graph_full")
"""Refused alone on a graph: a collective whose sizes come from data is not recomputed (APL304)."""
OFFLOAD = """include <llama3_sac>
offload everything in block where crosses block
offload matmul in block outside last block
offload all_to_all in last block
"""


def with_experts(trainer: str, policy: str, model: str, tmp_path: Path) -> Setting:
    """On two ranks, that share out FSDP's weights too, under a bundled policy or the one above."""
    before = "blocks layers.*\n"
    if policy == "moe":
        before += "recompute everything in block\nsave everything in block where crosses block\n"
    elif policy.startswith("fsdp"):
        before += "device h100-sxm\ninclude <llama3_sac>\n"
    again = "include <moe>\n" * (trainer == "graph" and policy in COMMUNICATES_AGAIN)
    load = "balance up to 2.0\n" * (trainer == "graph")
    path = tmp_path / "mine.apl"
    own = OFFLOAD if policy == "offload" else f"include <{policy}>\n"
    path.write_text(before + own + again + load)
    disabled = ("joint_transformer_block_bucketing_reordering_pass",) * policy.endswith("overlap")
    return Setting(trainer=trainer, model=model, experts=2, policy=str(path), disabled=disabled)


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("trainer", "policy"),
    [*(("eager", name) for name in EVERYWHERE), *(("graph", name) for name in (*EVERYWHERE, *ON_GRAPHS))],
)
def test_experts_that_lie_on_two_ranks(trainer: str, policy: str, model: str, tmp_path: Path) -> None:
    """Each receives what both ranks route to it; what is saved is planned for one load, and others are trained."""
    theirs = "default" if trainer == "graph" else None  # the graph trainer has no step without a policy
    own = trained(Setting(trainer=trainer, model=model, theirs=theirs, experts=2), 2)
    ours = trained(with_experts(trainer, policy, model, tmp_path), 2)
    assert_same_training(ours, own)
    assert ours[0].losses != ours[1].losses
    assert [outcome.audit for outcome in ours] == [True, True]
    assert (ours[0].reported > 0) is (policy not in ("save_all", "prelude"))


@pytest.mark.parametrize(
    ("trainer", "policy", "said"),
    [
        ("eager", "torchtitan_default", "APL301.*`save everything outside block feeding"),
        ("eager", "torchtitan_eager", "APL301.*`save everything outside block feeding"),
        ("eager", "fsdp_reshard_never", "APL414.*`override save fsdp_weight` wants the weights of `layers.0` kept"),
        ("eager", "fsdp_overlap", "APL306.*`bucket weight_gather per block`"),
        ("eager", "fsdp_tp_overlap", "APL306.*`bucket weight_gather per block`"),
        ("eager", "replay", "APL301.*`override save everything where recorded saved`"),
        ("graph", "replay", "APL301.*`override save everything where recorded saved`"),
    ],
)
def test_what_does_not_hold_for_experts_is_refused_at_its_line(
    trainer: str, policy: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=said):
        trained(with_experts(trainer, policy, "deepseek_v3", tmp_path), 2)


@pytest.mark.parametrize(("model", "theirs"), [("llama3", "selective"), ("llama3", "full"), ("qwen3", "selective")])
def test_the_eager_trainer_trains_to_the_same_bits(model: str, theirs: str) -> None:
    ours = trained(Setting(trainer="eager", model=model, policy=EAGER[theirs]))
    own = trained(Setting(trainer="eager", model=model, theirs=theirs))
    assert_same_training(ours, own)
    assert ours[0].audit is True
    assert ours[0].reported > 100


def test_experts_in_the_eager_trainer() -> None:
    ours = trained(Setting(trainer="eager", model="deepseek_v3", policy=EAGER["selective"]))
    own = trained(Setting(trainer="eager", model="deepseek_v3", theirs="selective"))
    assert_same_training(ours, own)
    assert ours[0].reported > 100
    assert ours[0].audit is True


@pytest.mark.parametrize("theirs", EAGER)
def test_the_eager_trainer_on_two_ranks(theirs: str) -> None:
    """Under FSDP2, which gathers a block's weights before it runs again."""
    ours = trained(Setting(trainer="eager", policy=EAGER[theirs]), 2)
    own = trained(Setting(trainer="eager", theirs=theirs), 2)
    assert_same_training(ours, own)
    assert ours[0].weights != ours[1].weights
    assert [outcome.audit for outcome in ours] == [True, True]


def test_the_eager_trainer_on_two_ranks_offloads(tmp_path: Path) -> None:
    path = tmp_path / "offload.apl"
    path.write_text(
        "blocks layers.*\n"
        "recompute everything in block\n"
        "offload everything in block where crosses block\n"
        "offload attention in block outside last block\n"
    )
    ours = trained(Setting(trainer="eager", policy=str(path)), 2)
    assert_same_training(ours, trained(Setting(trainer="eager", theirs=None), 2))
    assert [outcome.audit for outcome in ours] == [True, True]


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_script_of_the_eager_trainer() -> None:
    """`include <fsdp>` is what TorchTitan tells FSDP2 by default: a difference would stop the first step."""
    ours = trained(Setting(trainer="eager", example="torchtitan_eager", policy=str(EXAMPLES / "sac_fsdp.apl")), 2)
    assert_same_training(ours, trained(Setting(trainer="eager"), 2))
    assert [outcome.audit for outcome in ours] == [True, True]
    assert ours[0].reported > 100


def test_the_script_of_the_graph_trainer() -> None:
    ours = trained(Setting(example="torchtitan_graph", policy=str(EXAMPLES / "titan_graph.apl")), 2)
    own = trained(Setting(theirs="default"), 2)
    assert_same_training(ours, own)
    assert [outcome.audit for outcome in ours] == [True, True]
    assert (ours[0].gathers, own[0].gathers) == (7, 6), "the policy gathers the head's weight again"


@pytest.mark.parametrize("order", ["fsdp_overlap", "fsdp_tp_overlap"])
def test_the_graph_trainer_in_the_order_of_a_policy(order: str, tmp_path: Path) -> None:
    """Its own pass that joins and moves collectives is off, so that what was planned is what runs."""
    own = trained(Setting(theirs="default"), 2)
    path = tmp_path / "ordered.apl"
    path.write_text(f"device h100-sxm\ninclude <torchtitan_default>\ninclude <{order}>\n")
    disabled = ("joint_transformer_block_bucketing_reordering_pass",)
    ours = trained(Setting(policy=str(path), disabled=disabled), 2)
    assert_same_training(ours, own)
    for outcome in ours:
        assert outcome.audit is True
        traced, planned, sent = outcome.planned
        assert sent == planned < traced


RUNTIME = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
"""The schedules that run stages as graphs."""


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", *RUNTIME])
def test_the_stages_of_the_eager_trainer(schedule: str) -> None:
    run = Setting(trainer="eager", pipeline=schedule, layers=4)
    plain = trained(run, 2)
    for policy in (*EAGER.values(), "llama3_sac"):
        ours = trained(evolve(run, policy=policy), 2)
        assert_same_training(ours, plain)
        assert [outcome.audit for outcome in ours] == [True, True]
        assert all(outcome.reported for outcome in ours)


@pytest.mark.parametrize("schedule", RUNTIME)
def test_the_stages_of_the_graph_trainer(schedule: str, tmp_path: Path) -> None:
    """Their forward, their backward, and where the schedule splits it the parts for inputs and for weights; DualPipeV
    runs the backward of one stage and the forward of the other as one graph."""
    run = Setting(pipeline=schedule, layers=4)
    own = trained(evolve(run, theirs="default"), 2)
    offloads = tmp_path / "offloads.apl"
    offloads.write_text(
        "blocks layers.*\n"
        "recompute everything in block\n"
        "save attention in block\n"
        "save matmul in first half of stages\n"
        "offload matmul in last stage\n"
    )
    for policy in ("torchtitan_default", "llama3_sac", str(offloads)):
        ours = trained(evolve(run, policy=policy), 2)
        assert_same_training(ours, own)
        assert [outcome.audit for outcome in ours] == [True, True]
        assert [outcome.multiplexed > 0 for outcome in ours] == [schedule == "DualPipeV"] * 2
        if policy == "torchtitan_default":
            assert [outcome.ran for outcome in ours] == [outcome.ran for outcome in own]


def test_the_weights_of_stages_are_gathered_once() -> None:
    """Two stages on each of four ranks, whose weights two ranks share: a graph gathers them, joined where a policy
    joins them there."""
    disabled = ("joint_transformer_block_bucketing_reordering_pass",)
    run = Setting(pipeline="Interleaved1F1B", layers=4, disabled=disabled)
    own = trained(evolve(run, theirs="default"), 4)
    for policy in ("torchtitan_default", "torchtitan_graph_full"):
        ours = trained(evolve(run, policy=policy), 4)
        assert_same_training(ours, own)
        assert [outcome.gathers for outcome in ours] == [outcome.gathers for outcome in own]
    joined = evolve(run, policy=policy, unshard="bucket (all_gather where from parameter) up to 64 MiB")
    ours = trained(joined, 4)
    assert_same_training(ours, own)
    assert [outcome.gathers for outcome in ours] == [2, 2, 2, 2]
    assert own[0].gathers > 10


def test_a_stage_is_told_that_its_gathers_are_joined() -> None:
    """As TorchTitan does unless told otherwise: the bits are the same, and each microbatch gathers."""
    run = Setting(pipeline="Interleaved1F1B", layers=4)
    ours, theirs = evolve(run, policy="torchtitan_default"), evolve(run, theirs="default")
    assert_same_training(trained(ours, 4), trained(theirs, 4))
