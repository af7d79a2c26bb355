"""Blocks that do the same are one row and one line in a report; their values are found by short names."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import policylang
from policylang.audit.outcome import combined
from policylang.audit.report import (
    AuditReport,
    DecisionReport,
    Report,
    ValuesReport,
)
from policylang.language.plain_data import from_plain
from policylang.planning.plan import ExpectationOutcome

SAVE, AGAIN = DecisionReport("save", "p.apl:2"), DecisionReport("recompute", "p.apl:1")


def block(number: int, size: int = 1024, margin: float | None = None, **more: DecisionReport) -> Report:
    found = f"{size} B in block {number}"
    return Report(
        policy="p",
        forward_nodes=2,
        blocks=1,
        decisions={"mm": SAVE, "sin": AGAIN, **more},
        saved=ValuesReport(("mm",), size),
        recomputed=ValuesReport(("sin",), 512),
        audit=AuditReport(True),
        expectations=(
            ExpectationOutcome("expect saved <= 1 GiB", "p.apl:8", "deferred", "it is about a whole graph"),
            ExpectationOutcome("expect saved per block <= 2 KiB", "p.apl:9", "held", found, margin),
        ),
        label=f"layers.{number}",
    )


def rows(report: Report) -> list[str]:
    return str(report).split("\n\n")[-1].splitlines()


def expected(report: Report) -> list[str]:
    return [line for line in str(report).splitlines() if line.startswith("expect")]


def test_blocks_that_do_the_same_are_one_row_with_counts_and_sums() -> None:
    report = combined([*(block(n, margin=1024) for n in range(3)), block(3, 2048, 0)])
    assert rows(report) == [
        "block       times  forward values  saved  recomputed  total saved  total recomputed",
        "layers.0–2      3               2  1 KiB       512 B        3 KiB           1.5 KiB",
        "layers.3        1               2  2 KiB       512 B        2 KiB             512 B",
    ]
    assert expected(report) == [
        "expect      saved <= 1 GiB: deferred, it is about a whole graph",
        "expect      saved per block <= 2 KiB: held, 2048 B in block 3, the worst of 4 blocks",
    ]
    assert len(json.loads(report.to_json())["expectations"]) == 8
    assert len(json.loads(report.to_json())["graphs"]) == 4


def test_an_expectation_that_all_blocks_meet_alike_says_so() -> None:
    report = combined([block(n, margin=1024) for n in range(3)])
    assert expected(report)[1] == "expect      saved per block <= 2 KiB: held, 1024 B in each of 3 blocks"


def test_what_fails_is_named_though_others_hold() -> None:
    failed = block(1, 4096)
    failed = evolve(failed, expectations=(evolve(failed.expectations[1], status="failed", margin=-2048.0),))
    text = expected(combined([block(0, margin=1024), failed, block(2, margin=1024)]))
    assert text[1].endswith("failed, 4096 B in block 1; failed in 1 of 3 blocks: layers.1")


def test_a_block_that_decides_otherwise_for_the_same_figures_keeps_its_row() -> None:
    report = combined([block(0), block(1, mm=AGAIN), block(2)])
    assert [line.split()[0] for line in rows(report)] == ["block", "layers.0,", "layers.1"]
    assert rows(report)[1].startswith("layers.0, 2 ")


def test_blocks_that_all_differ_have_no_sums() -> None:
    assert rows(combined([block(0), block(1, 2048)])) == [
        "block     forward values  saved  recomputed",
        "layers.0               2  1 KiB       512 B",
        "layers.1               2  2 KiB       512 B",
    ]


def test_values_by_their_short_names() -> None:
    report = combined([block(0), block(1, mm=AGAIN, only=SAVE), block(1)])
    found = report.decisions
    assert list(found)[-1] == "layers.1#2/sin"
    assert found["layers.1/mm"] == found["sin"] == AGAIN
    assert found["only"] == found["layers.0/mm"] == SAVE
    assert all(name in found for name in ("sin", "only", "layers.1#2/mm", "layers.1/mm"))
    assert not any(name in found for name in ("mm", "sim", "", "/", None, 1))
    assert found.get("sin") == found.get("layers.1/mm") == found.get("sin", SAVE) == AGAIN
    assert found.get("mm") is None
    assert found.get("mm", SAVE) == SAVE
    assert found.get("sim", "no such value") == "no such value"
    assert "sin" not in list(found)
    with pytest.raises(KeyError) as caught:
        found["mm"]
    assert caught.value.args == (
        "`mm` is decided differently in 3 graphs: save layers.0/mm, layers.1#2/mm; recompute layers.1/mm",
    )
    for name, said in {
        "sim": "did you mean `sin`?",
        "layers.7/mm": "did you mean `layers.0/mm`",
        "": "the report has 7 values",
        "/": "the report has 7 values",
    }.items():
        with pytest.raises(KeyError, match=re.escape(said)):
            found[name]
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report
    assert pickle.loads(pickle.dumps(report)).decisions["sin"] == AGAIN
    assert from_plain(Report, json.loads(report.to_json())) == report


POLICY = """\
recompute everything in block
save matmul in block
recompute every 2nd (mm or addmm) per block
expect recomputed flops <= 90%
expect saved per block <= 30 MiB
"""
IDS = torch.arange(16).reshape(1, 16)


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=5, use_cache=False, **sizes))


def t5() -> PreTrainedModel:
    layers = {"num_layers": 3, "num_decoder_layers": 4, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_heads=2, use_cache=False, **layers)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "labels", "product"),
    [
        (llama, ["model.layers.0–4"], "mm_3"),
        pytest.param(
            t5,
            ["encoder.block.0", "encoder.block.1–2", "decoder.block.0", "decoder.block.1–3"],
            "mm_3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_models(make: Callable[[], PreTrainedModel], labels: list[str], product: str) -> None:
    torch.manual_seed(0)
    model = make().eval()  # without dropout: GPT-2 and T5 would have it
    blocks = "blocks {encoder,decoder}.block.*\n" if make is t5 else ""
    policylang.checkpoint_model(model, policylang.parse(blocks + POLICY))
    model(input_ids=IDS, labels=IDS).loss.backward()
    report = policylang.report(model)
    assert [line.split()[0] for line in rows(report)[1:]] == labels
    assert sum(int(line.split()[1]) for line in rows(report)[1:]) == len(report.graphs) == report.blocks
    assert [line.split(": ")[1].split(",")[0] for line in expected(report)] == ["deferred", "held"]
    assert len(report.expectations) == 2 * len(report.graphs)
    margins = [each.margin for each in report.expectations if each.margin is not None]
    assert sum(30 * 2**20 - margin for margin in margins) == report.saved.bytes
    first = report.graphs[0].label
    assert report.decisions[product] == report.decisions[f"{first}/{product}"]
    assert report.decisions[product].action == "recompute"
    assert report.decisions[f"{first.rpartition('.')[2]}/{product}"].rule == report.decisions[product].rule
