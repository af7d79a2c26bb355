"""Write the index of the diagnostic codes, ``docs/codes/README.md``, from the pages beside it.

    python scripts/make_code_index.py

The tests hold the index against the pages, so it cannot drift.
"""

from __future__ import annotations

from policylang.language.diagnostics import CODES
from policylang.language.resources import codes_folder

GROUPS = {
    "0": "Syntax: the text cannot be read",
    "1": "Names: a word stands for nothing, or for something else",
    "2": "Meaning: the text can be read and every name is known, and yet it means nothing",
    "3": "On this graph: the policy does not fit the graph it is applied to",
    "4": "Audit: the graph that came out does not do what the plan said",
    "5": "Policy tests: a test, or the graph that is written in it, cannot be read or fails",
    "6": "Between ranks and devices: ranks that share a graph do not agree about it, or it is another device's",
    "7": "Cost: the policy runs, and a line of it costs memory or work that it need not",
}


def index() -> str:
    parts = [
        "# Diagnostic codes",
        "A code never changes its meaning. `policylang explain APL101` prints the same text.",
    ]
    for digit, title in GROUPS.items():
        codes = [CODES[code] for code in sorted(CODES) if code[3] == digit]
        rows = "\n".join(f"- [{code.code}]({code.code}.md) {code.title} ({code.severity.value})" for code in codes)
        parts.append(f"## {title}\n\n{rows}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    (codes_folder() / "README.md").write_text(index(), encoding="utf-8")
    print(f"{len(CODES)} codes")


if __name__ == "__main__":
    main()
