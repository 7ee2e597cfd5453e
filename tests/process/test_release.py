"""scripts/release.py on a small repository: what it changes, tags, builds; a failure leaves all as it was."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "pyproject.toml": '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
    '[project]\nname = "small"\nversion = "0.1.0"\n',
    "CITATION.cff": "title: small\nversion: 0.1.0\n",
    "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (unreleased)\n\n- It is larger.\n\n## 0.1.0 (2026-01-02)\n",
    "examples/09_containers/Dockerfile": 'FROM python\nRUN pip install "small[more]==0.1.0"\n',
    "small.py": '"""Small."""\n',
    ".gitignore": "dist/\n",
    ".ci/run": "#!/bin/sh\ntest ! -e broken\n",
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".ci/run").chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release.py", tmp_path / "scripts")
    for command in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all"],
        ["commit", "--quiet", "-m", "Small"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def release(repository, *arguments):
    command = [sys.executable, str(repository / "scripts" / "release.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def git(repository, *arguments):
    return subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True, text=True).stdout


def test_a_release_is_dated_tagged_and_built(repository):
    done = release(repository, "0.2.0")
    assert done.returncode == 0, done.stderr
    today = datetime.date.today().isoformat()
    assert f"## 0.2.0 ({today})" in (repository / "CHANGELOG.md").read_text()
    assert (repository / "CITATION.cff").read_text() == f"title: small\nversion: 0.2.0\ndate-released: {today}\n"
    assert '"small[more]==0.2.0"' in (repository / "examples/09_containers/Dockerfile").read_text()
    assert git(repository, "tag").split() == ["v0.2.0"]
    assert git(repository, "status", "--porcelain") == ""
    assert {path.name for path in (repository / "dist").iterdir()} == {
        "small-0.2.0-py2.py3-none-any.whl",
        "small-0.2.0.tar.gz",
    }
    again = release(repository, "0.2.0")
    assert again.returncode == 1
    assert "0.2.0" in again.stderr


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.3.0", "CHANGELOG.md: ^## 0\\.3\\.0 \\(unreleased\\)$ stands there 0 times, not once"),
        ("1.0", "'1.0' is not a version"),
    ],
)
def test_what_cannot_be_released(repository, version, said):
    done = release(repository, version)
    assert done.returncode == 1
    assert said in done.stderr
    assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""


def test_a_failed_check_leaves_all_as_it_was(repository):
    (repository / "broken").touch()
    git(repository, "add", "broken")
    git(repository, "commit", "--quiet", "-m", "Broken")
    done = release(repository, "0.2.0")
    assert done.returncode == 1
    assert "nothing is released" in done.stderr
    assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""


def test_changes_come_first(repository):
    (repository / "small.py").write_text("changed = True\n")
    done = release(repository, "0.2.0")
    assert (done.returncode, "not committed" in done.stderr) == (1, True)
