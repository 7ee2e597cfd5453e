"""The command line explains itself: help, methods, what a mistake leads to, what is installed, a new project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE
from typer.main import get_command
from typer.testing import CliRunner

from fewbytes.cli.app import app
from fewbytes.cli.overview import COMMANDS
from fewbytes.experiments.catalogue import KINDS, about, payloads
from fewbytes.methods import FILES, METHODS
from fewbytes.methods.parts.averaging import Trained
from fewbytes.methods.parts.heterogeneous import ClassVectors


def test_the_overview_names_every_command() -> None:
    named = [name for commands in COMMANDS.values() for name in commands]
    assert sorted(named) == sorted(get_command(app).commands)


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",), ("--version",)])
def test_help_and_version_come_at_once(arguments: tuple[str, ...]) -> None:
    code = f"""import sys
sys.argv = ["fewbytes", *{arguments!r}]
from fewbytes.__main__ import main
try:
    main()
except SystemExit as ended:
    assert ended.code == 0
print(sorted({{"torch", "numpy", "typer", "rich"}} & sys.modules.keys()))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.endswith("[]\n")
    assert len(done.stdout.splitlines()) == 2 if arguments == ("--version",) else "fedpurin" in done.stdout


@pytest.mark.parametrize("command", [name for commands in COMMANDS.values() for name in commands])
def test_every_command_has_short_help(command: str, tmp_path: Path) -> None:
    done = fewbytes(command, "-h", cwd=tmp_path)
    assert done.returncode == 0
    assert f"fewbytes {command}" in done.stdout


@pytest.mark.parametrize("command", ["run", "compare", "plan", "deploy", "survey", "partition", "evaluate", "node"])
def test_help_is_short_and_all_of_it_has_every_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wider than 80 columns; words of the whole help are whole."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    short = CliRunner().invoke(app, [command, "--help"]).output
    assert len(short.splitlines()) <= 45
    assert max(map(len, short.splitlines())) <= 80
    if command == "node":
        return
    whole = CliRunner().invoke(app, [command, "--help-all"]).output
    words = whole.replace("│", " ").split()
    for each in get_command(app).commands[command].params:  # type: ignore[attr-defined]
        assert each.param_type_name == "argument" or each.opts[0] in words
        assert set((getattr(each, "help", None) or "").split()) <= set(words)
    assert max(map(len, whole.splitlines())) <= 80


def test_a_frame_is_read_by_the_classes_of_its_run(tmp_path: Path) -> None:
    """Of the method and of what it is wrapped in; elsewhere of all methods, where they agree on a name."""
    frame = tmp_path / "frames" / "1-train-0-up.frame"
    elsewhere = payloads(frame)
    assert elsewhere["ClassVectors"] is ClassVectors
    (tmp_path / "config.toml").write_text('method = "fedavg"\nsecure_aggregation = true\n')
    assert {"Model", "Trained", "Keys", "Revealed"} <= payloads(frame).keys()
    assert payloads(frame)["Trained"] is Trained
    assert "ClassVectors" not in payloads(frame)
    (tmp_path / "config.toml").write_text('method = "elsewhere:Mine"\n')
    assert payloads(frame) == elsewhere


def test_methods_are_listed_by_kind_a_line_each(tmp_path: Path) -> None:
    lines = fewbytes("methods", cwd=tmp_path).stdout.splitlines()
    assert [line.split(":")[0].lower() for line in lines if line and not line.startswith(" ") and ":" in line][:4] == [
        *KINDS
    ]
    for name in FILES:
        assert sum(line.strip().startswith(f"{name} ") for line in lines) == 1, name


def test_all_of_one_method(tmp_path: Path) -> None:
    done = fewbytes("methods", "fedpurin", cwd=tmp_path)
    words = " ".join(done.stdout.split())
    assert "Sparse Personalized" in words
    assert "number in (0, 1] " in words
    told = json.loads(fewbytes("methods", "fedpurin", "--json", cwd=tmp_path).stdout)[0]
    assert {"name": "tau", "kind": "number in (0, 1]", "default": 0.5}.items() <= told["parameters"][0].items()
    assert "did you mean 'fedpurin'" in fewbytes("methods", "fedpurim", cwd=tmp_path).stderr


@pytest.mark.parametrize("name", FILES)
def test_every_parameter_is_explained(name: str) -> None:
    told = about(name, METHODS[name])
    assert told.sends
    assert [each.name for each in told.parameters if len(each.meaning) < 4] == []


def test_a_parameter_named_as_an_option_leads_to_set(tmp_path: Path) -> None:
    done = fewbytes("run", "fedpurin", "--tau", "0.3", cwd=tmp_path)
    assert done.returncode == 2
    assert "--set tau=0.3\n" in done.stderr


def test_the_doctor_says_what_is_here(tmp_path: Path) -> None:
    done = fewbytes("doctor", cwd=tmp_path)
    assert done.returncode == 0
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert {"fewbytes", "torch", "GPU", "cores", "workers", "data", "flower", "vision"} <= found.keys()


def test_a_new_project_passes_its_tests(tmp_path: Path) -> None:
    assert fewbytes("new", "project", "my-hospitals", cwd=tmp_path).returncode == 0
    folder = tmp_path / "my-hospitals"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(tests, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout
    again = fewbytes("new", "project", "my-hospitals", cwd=tmp_path)
    assert (again.returncode, "exists and is not overwritten" in again.stderr) == (2, True)
    assert fewbytes("new", "project", "my hospitals", cwd=tmp_path).returncode == 2
