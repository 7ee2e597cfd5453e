"""The README's code blocks and the examples run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_python_blocks(tmp_path):
    assert blocks("python")
    subprocess.run([sys.executable, "-c", "\n".join(blocks("python"))], cwd=tmp_path, check=True, timeout=PATIENCE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("fewbytes ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path):
    done = fewbytes(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_config_block(tmp_path):
    (tmp_path / "experiment.toml").write_text(blocks("toml")[0])
    done = fewbytes("run", "-c", "experiment.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"tau": 0.3' in done.stdout


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_examples(example, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "MB up" in done.stdout
