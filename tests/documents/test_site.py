"""The site of the documentation: built strictly, whole, and without a load from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts.documentation.staging import documented, navigation, pages

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from pathlib import Path; from scripts.documentation.build import build; import sys; sys.exit(build({}))"

pytest.importorskip("furo", reason="the site needs the extra `docs`, which scripts/test installs")


class Document(HTMLParser):
    """What a page links to, what it loads, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag == "a" and "href" in found:
            self.links.append(found["href"] or "")
        elif tag == "link" and found.get("rel") not in ("next", "prev", "index", "search"):
            self.loads.append(found["href"] or "")
        elif "src" in found:
            self.loads.append(found["src"] or "")


def run_build(*arguments: Path) -> subprocess.CompletedProcess[str]:
    paths = ", ".join(f"Path({str(path)!r})" for path in arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BUILD.format(paths)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_the_site_is_built_and_holds_together(tmp_path: Path) -> None:
    """One test, because processes that run tests side by side would build the site once each. Among the fast ones, a
    small repository is built below, and `test_pages.py` follows the links of these pages."""
    site = tmp_path / "site"
    done = run_build(site, tmp_path / "work")
    assert (done.returncode, done.stderr) == (0, "")
    read = {path: Document(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(read) > 180
    assert broken_links(read) == []

    loads = {load for document in read.values() for load in document.loads}
    assert {load for load in loads if urlsplit(load).netloc or "//" in load} == set()
    styles = (path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    elsewhere = r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*"
    assert not [found for style in styles for found in re.findall(elsewhere, style)]

    index = (site / "searchindex.js").read_text(encoding="utf-8")  # a script: it works where there is no server
    assert index.startswith("Search.setIndex(")
    assert '"codes/APL301"' in index
    assert "llama3_sac" in index

    api = read[site / "api.html"]
    names = documented((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert {name for name in names if name not in api.anchors} == set()
    assert 'class="highlight-apl' in (site / "tutorial.html").read_text(encoding="utf-8")
    assert "recompute" in (site / "repository" / "policies" / "llama3_sac.apl.html").read_text(encoding="utf-8")


def broken_links(read: dict[Path, Document]) -> list[tuple[str, str]]:
    """Links that lead to no file, or to no anchor of it."""
    found = []
    for page, document in read.items():
        for link in document.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and anchor not in read[target].anchors):
                found.append((page.name, link))
    return found


SOUND = {
    "docs/index.md": "# Index\n\n## Start\n\n- [One](one.md): first\n- [Two](two.md): second\n"
    "- [All](codes/README.md): codes\n- [Contributing](../CONTRIBUTING.md): how\n- [Changes](../CHANGELOG.md): what\n",
    "docs/one.md": "# One\n\n[a file](../policies/some.apl) [a folder](../policies) [an anchor](#one)\n"
    "\n`[code](none.md)`\n\n```\n[block](none.md)\n```\n",
    "docs/two.md": "# Two\n\n[another's anchor](index.md#start)\n",
    "docs/codes/README.md": "# Codes\n\n- [APL001](APL001.md) a code\n",
    "docs/codes/APL001.md": "# APL001: a code\n",
    "policies/some.apl": "save mm  # ````\n",
    "CONTRIBUTING.md": "# Contributing\n",
    "CHANGELOG.md": "# Changes\n",
}


@pytest.mark.slow
def test_a_link_an_anchor_or_a_page_that_is_lost_fails_the_build(tmp_path: Path) -> None:
    """The second build starts from what the first one left, and complains of a page that has not changed."""
    root, site, work = tmp_path / "repository", tmp_path / "site", tmp_path / "work"
    written(root, SOUND)
    done = run_build(site, work, root)
    assert (done.returncode, done.stderr) == (0, "")
    read = {path: Document(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert broken_links(read) == []
    assert "repository/policies/some.apl.html" in read[site / "one.html"].links

    mistakes = {
        "docs/index.md": SOUND["docs/index.md"].replace("Start", "Begin").replace("- [Changes](../CHANGELOG.md)", "-"),
        "docs/one.md": "# One\n\n[no page](three.md) [no anchor](index.md#stop) [no file](../policies/none.apl)\n",
        "docs/orphan.md": "# Orphan\n",
    }
    written(root, mistakes)
    done = run_build(site, work, root)
    assert done.returncode == 1
    complaint = re.compile(r"^\S*/source/(\S+?\.md)\S* WARNING: (.*?)(?: \[|$)", re.MULTILINE)
    assert sorted(complaint.findall(done.stderr)) == [
        ("changelog.md", "document isn't included in any toctree"),
        ("one.md", "'myst' cross-reference target not found: '../policies/none.apl'"),
        ("one.md", "'myst' cross-reference target not found: 'three.md'"),
        ("one.md", "local id not found in doc 'index': 'stop'"),
        ("orphan.md", "document isn't included in any toctree"),
        ("two.md", "local id not found in doc 'index': 'start'"),
    ]


def written(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_the_front_page_goes_from_the_outside_in_and_names_every_page() -> None:
    sections = dict(navigation((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert [*sections] == ["Get started", "How-to", "Concepts", "Reference", "Compared"]
    listed = [(ROOT / "docs" / page).resolve() for entries in sections.values() for _, page in entries]
    assert len(listed) == len(set(listed))
    apart = {path for path in pages(ROOT) if path.parent.name == "codes" and path.name != "README.md"}
    assert set(listed) == set(pages(ROOT)) - apart - {ROOT / "docs" / "index.md"}
