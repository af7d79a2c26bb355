from __future__ import annotations

import pytest

from policylang.language.codes import CODES


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_a_long_form(policylang, code):
    outcome = policylang("explain", code.lower())
    assert outcome.code == 0
    assert outcome.out.startswith(f"{code}: {CODES[code].title} (")
    assert " ".join(CODES[code].text.split()) in " ".join(outcome.out.split())


def test_the_list_of_codes(policylang):
    lines = policylang("explain").out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(CODES)


def test_an_unknown_code(policylang):
    outcome = policylang("explain", "APL10")
    assert outcome.code == 2
    assert "no diagnostic has the code `APL10`" in outcome.err
    assert "help: did you mean `APL" in outcome.err
