"""The register of paths, by name."""

from __future__ import annotations

import pytest

from policylang.language.loader import parse_policy
from policylang.planning.capabilities import EAGER, HOOK, PLANNED, path_entry
from policylang.planning.order.statements import cannot_order


def test_a_path_is_found_by_its_name_and_another_word_is_told_the_names() -> None:
    assert [path_entry(name).name for name in PLANNED] == list(PLANNED)
    with pytest.raises(ValueError, match="there is no path `compiled`; there are eager, joint, flat, half, hook"):
        path_entry("compiled")


def test_eager_leaves_to_fsdp_what_fsdp_can_order() -> None:
    policy = parse_policy(
        "bucket all_gather per block; bucket all_gather in block per 2 blocks; bucket reduce_scatter up to 3 MiB\n"
        "prefetch all_gather 2 blocks ahead; delay reduce_scatter 1 block; optional overlap collective\n"
        "keep order of all_to_all"
    ).policy
    assert policy is not None
    refused = cannot_order(policy, EAGER)
    assert [each.span and each.span.text for each in refused] == [
        "bucket all_gather per block",
        "bucket all_gather in block per 2 blocks",
        "bucket reduce_scatter up to 3 MiB",
        "delay reduce_scatter 1 block",
        "keep order of all_to_all",
    ]
    assert {each.code for each in refused} == {"APL306"}
    said = (
        "`fully_shard` gathers",
        "`fully_shard` gathers",
        "`fully_shard` gathers",
        "no call for that",
        "leave the line",
    )
    assert [part in (each.help or "") for part, each in zip(said, refused, strict=True)] == [True] * 5
    assert len(cannot_order(policy, HOOK)) == 6
