"""The tables, cards and list of methods in the documents are what their scripts make of docs/decisions.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fewbytes.methods import FILES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def found() -> dict:
    return json.loads((ROOT / "docs" / "decisions.json").read_text("utf-8"))


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables(found):
    decisions = script("decisions")
    for path, text in decisions.pages(found[decisions.MODEL]).items():
        assert path.read_text("utf-8") == text


def test_cards_and_the_list(found):
    cards = script("cards")
    assert cards.tasks(found).keys() == set(FILES)
    for path, text in cards.pages(found).items():
        assert path.read_text("utf-8") == text
