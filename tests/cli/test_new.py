"""`fewbytes new method`: three files that run as they are, inside a checkout and elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fewbytes

from fewbytes.experiments.new import new_method

ROOT = Path(__file__).parents[2]


def test_a_new_method_runs_and_passes_its_test(tmp_path):
    done = fewbytes("new", "method", "FedTry", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"fedtry.py", "test_fedtry.py", "fedtry.md"}
    ran = fewbytes("run", "fedtry:FedTry", "--rounds", "1", "--clients", "2", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "uses model mlp" in ran.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-fedtry")
    assert 'method = "fedtry:FedTry"' in (folder / "config.toml").read_text()
    assert "--allow" in fewbytes("run", "--resume", folder, cwd=tmp_path).stderr  # its config names code
    resumed = fewbytes("run", "--resume", folder, "--allow", "fedtry", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    refused = fewbytes("run", "fedtry:FedTry", "--set", "fraction=nan", cwd=tmp_path)
    assert (refused.returncode, "fraction must be a number in (0, 1], not nan" in refused.stderr) == (2, True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fedtry.py"]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout


def test_in_a_checkout_its_files_are_where_all_methods_are(tmp_path):
    (tmp_path / "src/fewbytes/methods").mkdir(parents=True)
    (tmp_path / "src/fewbytes/methods/__init__.py").touch()
    shutil.copytree(ROOT / "tests/cases", tmp_path / "tests/cases")
    called, paths = new_method("FedTry", tmp_path / "src")
    assert called == "fedtry"
    places = {path.relative_to(tmp_path).as_posix() for path in paths}
    assert places == {"src/fewbytes/methods/fedtry.py", "tests/cases/fedtry.py", "docs/methods/fedtry.md"}


@pytest.mark.parametrize(
    ("name", "why"), [("fedavg", "already"), ("fed-try", "FedSAM"), ("class", "FedSAM"), ("Fedtaken", "exists")]
)
def test_what_cannot_be_written_is_told_and_nothing_is(name, why, tmp_path):
    (tmp_path / "fedtaken.md").write_text("mine")
    done = fewbytes("new", "method", name, cwd=tmp_path)
    assert (done.returncode, why in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["fedtaken.md"]
    assert (tmp_path / "fedtaken.md").read_text() == "mine"
