"""The documentation site: `make docs` builds it into build/docs, with warnings as errors."""

from importlib import metadata

project = "fewbytes"
author = "The fewbytes authors"
copyright = "2026, The fewbytes authors"
release = metadata.version("fewbytes")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
exclude_patterns = ["pictures", "*.json"]
myst_heading_anchors = 3
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
