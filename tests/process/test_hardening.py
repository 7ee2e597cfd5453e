"""The report of faults and attacks: what it names is there, and what fails or is missing is said."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

WHERE = Path(__file__).parents[2] / "benchmarks" / "hardening"
sys.path.insert(0, str(WHERE))
faults, Figure = importlib.import_module("faults"), importlib.import_module("figures").Figure
COSTS, FAULTS, Fault, Measure = faults.COSTS, faults.FAULTS, faults.Fault, faults.Measure
spec = importlib.util.spec_from_file_location("hardening", WHERE / "__main__.py")
hardening = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hardening)

CODE = """
import os, time
from figures import Figure
def good(count): return [Figure("cats", str(count), "3", count == 3)]
def bad(count): raise ValueError("the cat | left\\nno <note>")
def silent(count): return None
def slow(count): time.sleep(60)
def killed(count): os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def cats(tmp_path, monkeypatch):
    (tmp_path / "cats.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_every_row_is_there_with_functions_that_are_or_a_reason():
    assert [fault.number for fault in FAULTS] == list(range(1, 32))
    for fault in (*FAULTS, Fault(0, "costs", COSTS)):
        assert fault.measures or fault.lacking, fault
        for measure in (*fault.measures, *fault.stock):
            module, function = measure.name.split(".")
            tree = ast.parse((WHERE / f"{module}.py").read_text())
            assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], measure
            assert measure.usual <= measure.long, measure


def test_a_function_is_called_with_its_count():
    assert hardening.measured(Measure("cats.good", 3, 9), long=False)["figures"] == [("cats", "3", "3", True)]
    assert hardening.measured(Measure("cats.good", 3, 9), long=True)["figures"] == [("cats", "9", "3", False)]


@pytest.mark.parametrize(
    ("function", "limit", "words"),
    [
        ("bad", 60, "no <note>"),
        ("killed", 60, "exit code -9"),
        ("missing", 60, "AttributeError: module 'cats' has no attribute 'missing'"),
        ("silent", 60, "exit code 0"),
        ("slow", 2, "it takes more than 2 s"),
    ],
)
def test_one_that_fails_has_a_reason_and_no_figures(function, limit, words):
    found = hardening.measured(Measure(f"cats.{function}", 1, 1, limit), long=False)
    assert "figures" not in found
    assert words in found["failed"]


def test_the_page_says_what_is_met_missed_failed_and_not_measured():
    rows = [
        Fault(1, "cats", (Measure("a.a", 1, 1), Measure("a.b", 1, 1))),
        Fault(2, "dogs", (Measure("a.c", 1, 1),), stock=(Measure("a.e", 1, 1),)),
        Fault(3, "birds", (Measure("a.d", 1, 1),)),
        Fault(4, "fish", lacking="no water"),
    ]
    told, seconds = Figure("told", "7", "", None), {"seconds": 30}
    results = {
        "a.a": seconds | {"figures": [Figure("purrs", "9", "8", True), told]},
        "a.c": seconds | {"figures": [Figure("barks", "9", "8", True), Figure("bites", "1", "0", False)]},
        "a.d": seconds | {"failed": "no | <wings>"},
        "a.e": seconds | {"figures": [Figure("stock barks", "7", "8", False)]},
    }
    page = hardening.page(results, rows)
    assert re.search(r"Of 4 .*1 meet .*2 do not \(2, 3\), .*1 are not measured \(4\)", page)
    assert "| 1 | cats | purrs | 9 | 8 | met |\n|  |  | told | 7 |  |  |\n|  |  | a.b | not measured |  |  |" in page
    assert "| 2 | dogs | barks | 9 | 8 | met |\n|  |  | bites | 1 | 0 | **not met** |" in page
    assert "| 3 | birds | a.d | failed: no \\| &lt;wings> |  | **not met** |" in page
    assert "| 4 | fish |  | not measured |  |  |" in page
    assert "- 4, fish: no water." in page
    assert "0 of 1 figures meet the goal" in page


def test_the_page_that_is_there_is_made_of_the_results_that_are_there():
    docs = WHERE.parents[1] / "docs"
    results = hardening.json.loads((docs / "hardening.json").read_text())
    assert hardening.page(results) == (docs / "hardening.md").read_text()
    known = {each.name for fault in FAULTS for each in (*fault.measures, *fault.stock)}
    assert results.keys() <= known | {each.name for each in COSTS}
