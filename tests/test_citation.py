"""What programs read of the project: CITATION.cff, and llms.txt, whose links lead to pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

import fewbytes

ROOT = Path(__file__).parents[1]


def test_the_citation_has_what_its_format_requires():
    """As https://citation-file-format.github.io, version 1.2.0, has it."""
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    keys = dict(re.findall(r"^([a-z-]+): *(.*)$", text, re.MULTILINE))
    assert {"cff-version", "message", "title", "authors"} <= keys.keys()
    assert keys.keys() <= {
        "cff-version", "message", "title", "authors", "type", "license", "version", "abstract", "keywords", "url",
        "repository-code", "date-released",
    }  # fmt: skip
    assert (keys["cff-version"], keys["type"]) == ("1.2.0", "software")
    assert keys["version"] == fewbytes.__version__
    assert re.search(r"^authors:\n  - name: .+$", text, re.MULTILINE)


def test_links_of_llms_txt_lead_to_pages():
    text = (ROOT / "llms.txt").read_text("utf-8")
    assert text.startswith("# fewbytes\n\n> ")
    links = re.findall(r"\]\(https://fewbytes\.readthedocs\.io/en/latest/([\w/-]+)\.html\)", text)
    assert len(links) == text.count("](")
    assert len(links) > 15
    assert not [link for link in links if not (ROOT / "docs" / f"{link}.md").is_file()]
    assert 'html_extra_path = ["../llms.txt"]' in (ROOT / "docs" / "conf.py").read_text()
