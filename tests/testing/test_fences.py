"""The fenced blocks of a Markdown file, and the way from a block's text back to the file."""

from __future__ import annotations

from policylang.language.diagnostics import Source, Span
from policylang.testing.suites import fences, lifted, lowered

PAGE = """# One

```apl graph=two
save mm
```

~~~ apl
save bmm
```
~~~

## Two

  ````markdown
  ```apl
  save addmm
  ```
  ````
```not `a` fence```
```apl
save add"""


def blocks():
    return fences(Source("page.md", PAGE))


def test_what_counts_as_a_block():
    assert [(each.language, each.text) for each in blocks()] == [
        ("apl", "save mm\n"),
        ("apl", "save bmm\n```\n"),
        ("markdown", "  ```apl\n  save addmm\n  ```\n"),
        ("apl", "save add"),
    ]


def test_the_words_behind_a_fence():
    assert [word.text for word in blocks()[0].words] == ["apl", "graph=two"]


def test_headings_part_sections():
    assert [each.section for each in blocks()] == [1, 1, 2, 2]


def test_a_lifted_block_keeps_its_lines_and_a_lowered_span_its_text():
    for fence in blocks():
        source = lifted(fence)
        start = source.text.index(fence.text[0:6])
        span = Span(source, start, start + 6)
        back = lowered(span, fence, source)
        assert back.text == span.text
        assert (back.line, back.column) == (span.line, span.column)


def test_line_ends_of_another_system():
    (fence,) = fences(Source("page.md", "```apl\r\nsave mm\r\n```\r\n"))
    assert (fence.language, fence.text) == ("apl", "save mm\r\n")
