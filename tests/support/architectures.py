"""The bundled policies on thirty-six architectures of Transformers: small ones with random weights, traced as steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.diagnostics import is_error
from policylang.planning.capabilities import FLAT
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.planner import plan as make_plan
from tests.integrations.test_architectures import ARCHITECTURES, ENDS, GROUPED, WORDS, _config, _loss

POLICIES = (
    *("llama3_sac", "every_2nd_layer", "memory_staged", "save_all", "torchtitan_op_sac", "torchtitan_full"),
    *("torchtitan_default", "torchtitan_eager", "torchtitan_graph_full"),
)
DISTIL: dict[str, Any] = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **ARCHITECTURES,
    "Gemma": ("ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Glm": ("ForCausalLM", {**GROUPED, "head_dim": 8, "pad_token_id": 0}),
    "Granite": ("ForCausalLM", GROUPED),
    "Olmo2": ("ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "Phi": ("ForCausalLM", WORDS),
    "Qwen2": ("ForCausalLM", GROUPED),
    "StableLm": ("ForCausalLM", GROUPED),
    "DistilBert": ("ForMaskedLM", {**DISTIL, "max_position_embeddings": 64}),
    "Electra": ("ForMaskedLM", {**WORDS, "embedding_size": 32}),
    "Roberta": ("ForMaskedLM", {**WORDS, **ENDS}),
}


@cache
def facts_of(name: str) -> Facts:
    kind, settings = EVERY[name]
    dropped = {key: 0.0 for key in ("layerdrop", "decoder_layerdrop") if key in settings}  # decided by random numbers
    torch.manual_seed(0)
    model = getattr(transformers, name + kind)(getattr(transformers, _config(name))(**{**settings, **dropped}))
    return collect(policylang.trace_step(model.train(), lambda model: _loss(model, name, 0)).gm)


def outcome(name: str, policy: str) -> str:
    """The share of the bytes that are still saved, ``41%``; or the codes of the errors."""
    plan = make_plan(policylang.load(policy), facts_of(name), FLAT)
    if codes := sorted({found.code for found in plan.diagnostics if is_error(found)}):
        return ", ".join(codes)
    found = breakdown(plan)
    return f"{found.under.amounts.saved_bytes / found.without.amounts.saved_bytes:.0%}"


def table() -> str:
    """Architecture by policy, with the modules that a policy without a ``blocks`` line takes for blocks."""
    lines = [f"| architecture | blocks | {' | '.join(f'`{policy}`' for policy in POLICIES)} |"]
    lines.append("|---" * (len(POLICIES) + 2) + "|")
    for name in sorted(EVERY):
        first = next(iter(blocks_of(facts_of(name)).names))
        cells = " | ".join(outcome(name, policy) for policy in POLICIES)
        lines.append(f"| {name} | `{first.rpartition('.')[0]}.*` | {cells} |")
    return "\n".join(lines)
