"""The code blocks of README and the site run as they stand, and so do the examples.

What runs: ```python blocks of a page one after another, each `fewbytes` line of its ```bash blocks in order, and
```toml blocks that name a method. What cannot run here (other hosts, models of gigabytes, days of training) is ```sh or
```py. Tutorials run as notebooks (test_notebooks.py).
"""

from __future__ import annotations

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
RUN = [page for page in PAGES if not page.startswith("docs/tutorials/")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.S)


def commands(page: str, language: str = "bash") -> list[str]:
    joined = [re.sub(r"\\\n\s*", "", block) for block in blocks(page, language)]
    return [line for block in joined for line in block.splitlines() if line.startswith("fewbytes ")]


@pytest.mark.parametrize("page", [page for page in RUN if blocks(page, "python")])
def test_python_blocks(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in RUN if commands(page)])
def test_commands(page, tmp_path):
    for command in commands(page):
        words = shlex.split(command, comments=True)[1:]
        done = fewbytes(*words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout


def test_the_commands_for_tables(tmp_path):
    """On tables of the names that the pages have; those for other hosts only write what goes there."""
    pages = ("docs/command-line.md", "docs/tutorials/own-data.md")
    shown = [command for page in pages for command in commands(page, "sh") if ".csv" in command]
    assert len(shown) == 4
    (tmp_path / "sites").mkdir()
    for number, name in enumerate(("patients", "server", "sites/north", "sites/south")):
        drawn = random.Random(number)
        rows = [(drawn.gauss(60, 10), drawn.choice("fm")) for _ in range(120)]
        lines = [f"{age:.1f},{sex},{'ill' if age + 5 * (sex == 'm') > 62 else 'well'}" for age, sex in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,sex,outcome", *lines]))
    for command in shown:
        elsewhere = ["--print"] if "--hosts" in command else []
        done = fewbytes(*shlex.split(command)[1:], "--rounds", "2", *elsewhere, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert ("start.sh" if elsewhere else "global") in done.stdout


CONFIGS = [(page, n) for page in PAGES for n, text in enumerate(blocks(page, "toml")) if text.startswith("method")]


@pytest.mark.parametrize(("page", "number"), CONFIGS)
def test_configs(page, number, tmp_path):
    (tmp_path / "experiment.toml").write_text(blocks(page, "toml")[number])
    done = fewbytes("run", "-c", "experiment.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short_and_its_links_work_elsewhere():
    text = PAGES["README.md"]
    assert len(text.encode()) <= 6_000
    targets = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', text)
    assert targets
    assert all((inline or attribute).startswith("https://") for inline, attribute in targets)


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_examples(example, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "MB up" in done.stdout
