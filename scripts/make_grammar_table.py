"""Write the table of the parser from the grammar. Run it when ``grammar/apl.lark`` or the pinned lark has changed."""

from __future__ import annotations

from policylang.language.lexer import TABLE, table_of
from policylang.language.resources import grammar_file

if __name__ == "__main__":
    TABLE.write_text(table_of(grammar_file().read_text(encoding="utf-8")), encoding="utf-8")
    print(TABLE.name)
