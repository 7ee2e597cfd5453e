"""What methods leak: the page and the cards say what was measured."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("leaks", ROOT / "benchmarks" / "leaks.py")
leaks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(leaks)


@pytest.fixture
def results() -> dict:
    return json.loads((ROOT / "docs" / "leaks.json").read_text())


def test_the_page_and_the_cards_that_are_there_are_made_of_the_results_that_are_there(results):
    assert results.keys() == leaks.METHODS.keys()
    assert leaks.page(results) == (ROOT / "docs" / "leaks.md").read_text()
    assert leaks.asset(results) == leaks.ASSET.read_text()
    for method in results:
        text = (ROOT / "docs" / "methods" / f"{method}.md").read_text()
        assert leaks.card(method, results, text) == text


def test_every_control_succeeds_and_one_that_does_not_makes_what_stands_beside_it_void(results):
    assert "void:" not in leaks.page(results)
    weak = copy.deepcopy(results)
    control = weak["fedavg"]["backdoor"]["poisoned"][0]
    control["success"] = 0.79
    assert leaks.cells("fedprox", weak)["backdoor"].startswith("void: ")
    assert not leaks.cells("fedprox", weak)["members"].startswith("void: ")


def test_a_card_gets_a_paragraph_and_keeps_the_rest(results):
    once = leaks.card("fedavg", results, "# FedAvg\n\nBytes.\n")
    assert once.startswith("# FedAvg\n\nBytes.\n\n**What it leaks**")
    assert leaks.card("fedavg", results, once) == once
    between = once + "\nMore.\n"
    assert leaks.card("fedavg", results, between) == between
