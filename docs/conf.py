"""The documentation site: `make docs` builds it into build/docs, with warnings as errors."""

from importlib import metadata

from sphinx.application import Sphinx

project = "fewbytes"
author = "The fewbytes authors"
copyright = "2026, The fewbytes authors"
release = metadata.version("fewbytes")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
exclude_patterns = ["pictures", "*.json"]
myst_heading_anchors = 3
html_extra_path = ["../llms.txt"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_theme = "furo"
html_title = "fewbytes"
html_theme_options = {
    "source_repository": "https://github.com/fewbytes/fewbytes/",
    "source_branch": "main",
    "source_directory": "docs/",
}
autosummary_generate = False  # only the tables, which link to the descriptions below them
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
default_role = "code"  # `name` in docstrings
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _with_glossary(_: object, page: str, source: list[str]) -> None:
    """Link the glossary at the end of every page with a table."""
    if "\n| --- " in source[0] and "glossary.md" not in source[0] and page != "glossary":
        source[0] += f"\n\nThe [glossary]({'../' * page.count('/')}glossary.md) explains the terms of the tables.\n"


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _with_glossary)
