"""Docstrings: what is public has one, what the reference lists shows an example, and examples print what they say."""

from __future__ import annotations

import doctest
import importlib
import operator
import re
from pathlib import Path

import pytest
from modules import MODULES

import fewbytes

REFERENCE = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))
WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>> " in path.read_text("utf-8")]


@pytest.mark.parametrize("package", ["fewbytes", "fewbytes.codec", "fewbytes.data", "fewbytes.models", "fewbytes.wire"])
def test_what_is_public_has_a_docstring(package):
    module = importlib.import_module(package)
    offered = [getattr(module, name) for name in module.__all__]
    ours = [each for each in offered if callable(each) and each.__module__.startswith("fewbytes.")]
    assert len(ours) > 5
    written = {each for each in ours if each.__doc__ and not each.__doc__.startswith(f"{each.__name__}(")}
    assert not set(ours) - written  # a dataclass without one is given its signature


def test_what_the_reference_lists_shows_an_example():
    """In its docstring, or in one of its own functions'."""
    text = "".join(page.read_text("utf-8") for page in REFERENCE)
    listed = re.findall(r"^\.\. auto\w+:: fewbytes\.(\S+)$", text, re.MULTILINE)
    assert len(listed) > 30
    find = doctest.DocTestFinder().find
    assert not [name for name in listed if not any(each.examples for each in find(operator.attrgetter(name)(fewbytes)))]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_say(module, capsys):
    """Each as a reader runs it, who has imported nothing."""
    result = doctest.testmod(importlib.import_module(module), globs={})
    assert result.attempted
    assert not result.failed, capsys.readouterr().out
