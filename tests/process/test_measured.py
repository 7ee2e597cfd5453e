"""The tables, cards and list of methods in the documents are what their scripts make of docs/decisions.json, and of
docs/agreement.json."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from fewbytes.methods import FILES

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "docs" / "methods"


@pytest.fixture
def found() -> dict:
    return json.loads((ROOT / "docs" / "decisions.json").read_text("utf-8"))


def script(name: str, folder: str = "scripts"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tables(found):
    decisions = script("decisions")
    for path, text in decisions.pages(found[decisions.MODEL]).items():
        assert path.read_text("utf-8") == text


@pytest.mark.parametrize(
    "card", [card for card in sorted(CARDS.glob("*.md")) if card.stem != "index"], ids=lambda card: card.stem
)
def test_a_card_opens_with_what_the_method_is_for(card):
    """In five lines, before the paper and the figure; results are in the measured parts."""
    title, purpose, *rest = card.read_text("utf-8").split("\n\n")
    assert title.startswith("# ")
    assert re.fullmatch(r"\*\*What it does\.\*\*\s.+\s\*\*Take\sit\*\*\s.+\s\*\*Not\*\*\s.+", purpose, re.DOTALL)
    assert len(purpose.splitlines()) <= 5
    assert not re.search(r"\d+(\.\d+)? ?%|\d MB", purpose)
    assert not any("<!-- figure -->" in each or "![" in each for each in rest[:1])  # the paper


def test_cards_and_the_list(found):
    cards = script("cards")
    assert cards.tasks(found).keys() == set(FILES)
    for path, text in cards.pages(found).items():
        assert path.read_text("utf-8") == text


def test_agreement_with_other_code():
    page = script("page", "benchmarks/peers")
    for path, text in page.pages(json.loads(page.FIGURES.read_text("utf-8"))).items():
        assert path.read_text("utf-8") == text


def test_situations():
    situations = script("situations", "benchmarks")
    found = json.loads(situations.FIGURES.read_text("utf-8"))
    assert found.keys() == {each.key for each in situations.SITUATIONS}
    for path, text in situations.pages(found).items():
        assert path.read_text("utf-8") == text


def test_a_situation_states_the_figures_of_the_papers_setting():
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "situations.md").read_text("utf-8"))
    rows = (ROOT / "docs" / "reproductions-small.md").read_text("utf-8")
    row = next(line for line in rows.splitlines() if "FedPURIN is the most accurate of all where" in line).split("|")[3]
    measured = {name: float(score) for name, score in re.findall(r"(\w+) ([\d.]+) ±", row)}
    for name, words in (
        ("FedPURIN", "FedPURIN has"),
        ("Separate", "training alone"),
        ("FedAvg", "FedAvg"),
        ("FedBN", "the best baseline, FedBN,"),
    ):
        assert f"{words} {measured[name]:.1f} %" in text
    assert max(measured.values()) == measured["FedBN"]


def test_an_interval_of_paired_differences():
    page = script("page", "benchmarks/peers")
    mean, half = page.interval([0.01, 0.02, 0.03])
    assert (mean, half) == (pytest.approx(0.02), pytest.approx(4.303 * 0.01 / 3**0.5))
    apart = {"seeds": [{"sent": [0.9, 0.8]}, {"sent": [0.9, 0.79]}, {"sent": [0.9, 0.81]}]}
    assert page.scores(apart, "sent") == "90.0%, 80.0%: **+10.0 ± 2.5**"
    equal = {"sent": [0.5, 0.5], "trained": [0.6, 0.6]}
    assert page.same({"same": 2e-7, "same_scores": equal, "changed": False}) == "equal (2e-07), scores too"
    other = {"same": 0.3, "same_scores": equal | {"sent": [0.5, 0.48]}, "changed": True}
    assert page.same(other) == "**0.3 apart**, scores up to 2 points apart; a part changed"


def test_links():
    page = script("page", "benchmarks/links")
    for path, text in page.pages(json.loads(page.FIGURES.read_text("utf-8"))).items():
        assert path.read_text("utf-8") == text
