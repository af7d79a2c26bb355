"""Write a page for every diagnostic code, and their index, from the declarations in ``policylang/language/codes``.

    python scripts/make_code_pages.py

The tests hold the pages against the declarations, so they cannot drift.
"""

from __future__ import annotations

from pathlib import Path

from policylang.language.codes import CODES, Code

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "codes"
GROUPS = {
    "0": "Syntax: the text cannot be read",
    "1": "Names: a word stands for nothing, or for something else",
    "2": "Meaning: the text can be read and every name is known, and yet it means nothing",
    "3": "On this graph: the policy does not fit the graph it is applied to",
    "4": "Audit: the graph that came out does not do what the plan said",
    "5": "Policy tests: a test, or the graph that is written in it, cannot be read or fails",
    "6": "Between ranks: those that share a graph do not agree about it",
}


def page(code: Code) -> str:
    parts = [f"# {code.code}: {code.title}", f"*{code.severity.value}*", code.text]
    if code.wrong:
        parts.append(f"Wrong:\n\n```apl ignore\n{code.wrong}\n```")
    if code.mended:
        said = "apl" if code.code[3] in "012" else "apl ignore"  # what is right on a graph needs one
        parts.append(f"Right:\n\n```{said}\n{code.mended}\n```")
    return "\n\n".join(parts) + "\n"


def index() -> str:
    parts = [
        "# Diagnostic codes",
        "A code never changes its meaning. `policylang explain APL101` prints the same text.",
    ]
    for digit, title in GROUPS.items():
        codes = [code for code in pages() if code.code[3] == digit]
        if codes:
            rows = "\n".join(f"- [{code.code}]({code.code}.md) {code.title} ({code.severity.value})" for code in codes)
            parts.append(f"## {title}\n\n{rows}")
    return "\n\n".join(parts) + "\n"


def pages() -> list[Code]:
    return sorted(CODES.values(), key=lambda code: code.code)


def files() -> dict[str, str]:
    """File name to text, for all that belongs in the folder."""
    return {"README.md": index(), **{f"{code.code}.md": page(code) for code in pages()}}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = files()
    for stale in FOLDER.glob("*.md"):
        if stale.name not in wanted:
            stale.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} pages")


if __name__ == "__main__":
    main()
