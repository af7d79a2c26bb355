"""The register of paths, by name."""

from __future__ import annotations

import pytest

from policylang.planning.capabilities import PLANNED, path_entry


def test_a_path_is_found_by_its_name_and_another_word_is_told_the_names() -> None:
    assert [path_entry(name).name for name in PLANNED] == list(PLANNED)
    with pytest.raises(ValueError, match="there is no path `compiled`; there are eager, joint, flat, half, hook"):
        path_entry("compiled")
