"""Golden tests hold on other vectors than the first set's: a second set, whose makers the first one vouches for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import second_golden
from second_golden.common import ARCHIVES, FIRST, TABLES

TESTS = Path(__file__).parents[1]
NOISE = ("mlp.0.bias", "mlp.1.running_mean", "class_means_after")  # of rounding, which Adam makes large: see its README


def same(made: Any, found: Any) -> None:
    """Each entry that was made is what was found."""
    if isinstance(made, dict):
        for name, value in made.items():
            same(value, found[name])
    elif isinstance(made, list):
        assert len(made) == len(found)
        for one, other in zip(made, found, strict=True):
            same(one, other)
    else:
        assert made == found


@pytest.mark.parametrize("name", ARCHIVES)
def test_the_makers_of_the_second_set_make_the_first_s_values(name: str) -> None:
    with np.load(FIRST / f"{name}.npz") as file:
        found = dict(file)
    more = [json.loads((FIRST / "fedkgf" / "grouping.json").read_text())["assemblies"]] if "assembly" in name else []
    made = ARCHIVES[name][1](found, *more)
    shared = [key for key in made if key in found and not key.endswith(NOISE)]
    assert shared
    for key in shared:
        value, expected = np.asarray(made[key]), found[key]
        assert value.shape == expected.shape, key
        if expected.dtype.kind == "f":
            single = name.startswith(("fedktl", "fedpurin")) or expected.dtype != np.float64
            close = {"rtol": 1e-3, "atol": 2e-5} if single else {"rtol": 1e-7, "atol": 1e-7}
            np.testing.assert_allclose(value.astype(float), expected.astype(float), **close, err_msg=key)
        else:
            assert (value != expected).mean() <= ("backdoor" in name) * 0.02, key  # of drawings a pixel may differ


@pytest.mark.parametrize("name", TABLES)
def test_the_makers_of_the_second_set_make_the_first_s_tables(name: str) -> None:
    found = json.loads((FIRST / f"{name}.json").read_text())
    same(TABLES[name][1](json.loads(json.dumps(found))), found)


def test_golden_tests_pass_on_a_second_set(tmp_path: Path) -> None:
    second_golden.write(tmp_path)
    first = {str(path.relative_to(FIRST)) for path in FIRST.rglob("*.*") if path.suffix in (".npz", ".json")}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == first
    files = [
        str(path)
        for path in TESTS.rglob("test_*.py")
        if "pytest.mark.golden" in path.read_text() and path != Path(__file__)
    ]
    arguments = [sys.executable, "-m", "pytest", "-m", "golden", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"FEWBYTES_GOLDEN": str(tmp_path)}
    done = subprocess.run(arguments, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
