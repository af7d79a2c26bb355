"""The work of the recorded Llama-3 8B, by hand: its products are einsums there."""

from __future__ import annotations

from policylang.graph.facts import uncounted_operators
from tests.support.shared_graphs import ONE_DEVICE, shared_facts

TOKENS, LENGTH, HIDDEN, LAYERS = 32 * 8192, 8192, 4096, 32
KEYS, FEED_FORWARD, VOCABULARY = 1024, 14336, 128256


def test_a_forward_is_its_products_and_its_attention() -> None:
    facts = shared_facts(ONE_DEVICE)
    flops = {name: sum(facts.flops[row] for row in rows) for name, rows in facts.by_target.items()}
    weights = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FEED_FORWARD) + HIDDEN * VOCABULARY
    products = 2 * TOKENS * weights
    attention = (
        LAYERS * 2 * 2 * TOKENS * LENGTH * HIDDEN
    )  # queries by keys, scores by values; the mask is not looked at
    assert {name: found for name, found in flops.items() if found} == {
        "aten.einsum.default": products,
        "aten._scaled_dot_product_flash_attention.default": attention,
    }
    assert products > 3 * attention
    assert uncounted_operators(facts, range(len(facts))) == {}  # its casts are a custom operator, and do no work
