"""The settings of Sphinx for the site; ``scripts/docs`` builds it from what ``staging.py`` lays out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

from policylang.integrations.apl_lexer import PolicyLexer

project = "policylang"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = "policylang"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# Headings have the anchors that the repository's own view of Markdown gives them.
myst_heading_anchors = 6
highlight_language = "text"
default_role = "code"

autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True, "undoc-members": True}
# What is on the page is made by functions: nobody has to read a constructor of twenty fields.
autodoc_default_options |= {"exclude-members": "__init__, __new__"}
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# TorchTitan is optional, and what the site says must not depend on what is installed.
autodoc_mock_imports = ["torchtitan", "transformers", "lightning"]
toc_object_entries_show_parents = "hide"


_NAVIGATION: dict[str, str] = {}
"""By the folder of the pages that share it."""


def _share_navigation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Make the navigation once for all the pages of a folder that stand in none, which else is half of a build."""
    tree, folder = context.get("toctree"), page.rpartition("/")[0]
    if tree is not None and "orphan" in app.env.metadata[page]:
        context["toctree"] = lambda **options: (
            _NAVIGATION.get(folder) or _NAVIGATION.setdefault(folder, tree(**options))
        )


def _read_sections(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """``Args:`` and ``Raises:`` of functions. Napoleon as an extension takes every colon of an attribute for a type."""
    if what in ("function", "method", "class"):
        lines[:] = GoogleDocstring(lines, what=what).lines()


def setup(app: Sphinx) -> None:
    """The words behind fences: in the site, ``apl`` is the policy language and ``graph`` has no colours."""
    app.add_lexer("apl", PolicyLexer)
    app.add_lexer("graph", TextLexer)
    app.connect("autodoc-process-docstring", _read_sections)
    app.connect("html-page-context", _share_navigation, priority=100)
