"""What `make test` leaves to `make test-all` follows from what a change touches, and collecting the tests is quick."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import levels
import pytest
from cases import CASES
from levels import COVERING, QUICK, SLOW, digests, is_for_all_alone, quick_cases
from modules import MODULES, imports_of

TESTS = Path(__file__).parent
HEAVY = {
    "accelerate", "diffusers", "matplotlib", "mlflow", "nbclient", "onnx", "peft", "plotly", "ray", "scipy", "sklearn",
    "sympy", "torchmetrics", "torchvision", "transformers", "yolox",
}  # fmt: skip
"""Libraries that take seconds to import, which each worker would take before its first test."""


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """Of a file, or None: the cases that `make test` runs once something is written at its end, all being verified."""
    monkeypatch.setattr(levels, "FILE", tmp_path / "verified.json")
    levels.FILE.write_text(json.dumps(digests()))
    read = Path.read_bytes

    def selected(path: Path | None) -> frozenset[str]:
        monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"#" * (self == path))
        quick_cases.cache_clear()
        return quick_cases()

    yield selected
    quick_cases.cache_clear()


def test_nothing_that_changed_leaves_the_covering_cases(changed):
    assert changed(None) == set(COVERING) < set(CASES)


def test_a_methods_file_selects_its_cases(changed):
    ditto = {name for name in CASES if name.startswith("ditto")}
    assert changed(MODULES["fewbytes.methods.ditto"]) == ditto | set(COVERING)
    assert changed(TESTS / "cases" / "ditto.py") == ditto | set(COVERING)


def test_a_part_selects_the_cases_of_the_methods_that_import_it(changed):
    part = "fewbytes.methods.parts.distillation"
    found = changed(MODULES[part])
    for name, method in CASES.items():
        imports = part in imports_of(MODULES[type(method).__module__])
        assert not imports or name in found
    assert set(COVERING) < found < set(CASES)


@pytest.mark.parametrize("room", levels.GROUND)
def test_what_all_stand_on_selects_all(room, changed):
    path = next(path for name, path in MODULES.items() if name.startswith(f"fewbytes.{room}."))
    assert changed(path) == set(CASES)


def test_the_tests_own_machinery_selects_all(changed):
    for path in (TESTS / "runs.py", TESTS / "laws" / "test_engines.py", TESTS.parent / "pyproject.toml"):
        assert changed(path) == set(CASES)


def test_without_a_note_of_what_was_verified_all_are_run(changed):
    levels.FILE.unlink()
    assert changed(None) == set(CASES)


def test_of_the_laws_other_cases_are_left_out(changed):
    assert changed(None)
    assert not is_for_all_alone("laws/test_engines.py::test_x[fedavg]", "fedavg")
    assert is_for_all_alone("laws/test_engines.py::test_x[fedbn]", "fedbn")
    assert not is_for_all_alone("models/test_models.py::test_x[fedbn]", "fedbn")  # whose tests are not over cases


def test_what_is_listed_is_there():
    """A test that has another name by now would come back to every change unseen, or be lost to it."""
    files = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("test_*.py")}
    for beginning in (*SLOW, *QUICK):
        name, _, test = beginning.partition("::")
        named = [text for path, text in files.items() if path.startswith(name)]
        assert any(f"def {test.partition('[')[0]}" in text for text in named), beginning


def test_tests_import_what_is_heavy_where_they_need_it():
    for path in TESTS.rglob("*.py"):
        if path.is_relative_to(TESTS / "second_golden"):
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not HEAVY & {name.partition(".")[0] for name in names}, path
