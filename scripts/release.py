"""Makes a release: dates the changelog, sets the version, checks as CI does, builds, commits, tags; publishes nothing.

    python scripts/release.py 0.9.0            # then push and upload, as it says at the end
    python scripts/release.py 0.9.0 --unchecked  # without .ci/run, which has passed already

Ends with 1, and leaves the files as they were, where the tree has changes, the version is no later than the last one
tagged, the changelog has no "## 0.9.0 (unreleased)", or a check fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGED = ("CHANGELOG.md", "CITATION.cff", "pyproject.toml", "examples/09_containers/Dockerfile")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def numbers(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"{version!r} is not a version: three numbers, such as 0.9.0")
    return tuple(map(int, version.split(".")))


def substituted(text: str, pattern: str, by: str, where: str) -> str:
    changed, times = re.subn(pattern, by, text, flags=re.MULTILINE)
    if times != 1:
        sys.exit(f"{where}: {pattern} stands there {times} times, not once")
    return changed


def edits(version: str, today: str) -> dict[str, Callable[[str], str]]:
    """What is changed in each file."""

    def changelog(text: str) -> str:
        heading = rf"^## {re.escape(version)} \(unreleased\)$"
        return substituted(text, heading, f"## {version} ({today})", "CHANGELOG.md")

    def citation(text: str) -> str:
        text = re.sub(r"^date-released: .*\n", "", text, flags=re.MULTILINE)
        return substituted(text, r"^version: .*$", f"version: {version}\ndate-released: {today}", "CITATION.cff")

    def project(text: str) -> str:
        return substituted(text, r'^version = ".*"$', f'version = "{version}"', "pyproject.toml")

    def image(text: str) -> str:
        return substituted(text, r'(?<=\]==)[^"]*(?="$)', version, "Dockerfile")

    return dict(zip(CHANGED, (changelog, citation, project, image), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--unchecked", action="store_true", help="do not run .ci/run")
    options = parser.parse_args()
    version = options.version
    if git("status", "--porcelain"):
        sys.exit("there are changes that are not committed: commit or put them away first")
    tagged = [tag.removeprefix("v") for tag in git("tag", "--list", "v*").split()]
    if tagged and numbers(version) <= max(map(numbers, tagged)):
        sys.exit(f"{version} is no later than {max(tagged, key=numbers)}, which is tagged")
    numbers(version)
    before = {name: (ROOT / name).read_text("utf-8") for name in CHANGED}
    after = {name: edit(before[name]) for name, edit in edits(version, date.today().isoformat()).items()}
    try:
        for name, text in after.items():
            (ROOT / name).write_text(text, "utf-8")
        if not options.unchecked:
            subprocess.run([ROOT / ".ci" / "run"], cwd=ROOT, check=True)
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "build", "--outdir", ROOT / "dist", ROOT], check=True)
        git("commit", "--quiet", "--message", f"Version {version}", "--", *CHANGED)
    except (subprocess.CalledProcessError, KeyboardInterrupt) as error:
        for name, text in before.items():
            (ROOT / name).write_text(text, "utf-8")
        sys.exit(f"nothing is released, and the files are as they were: {error or 'interrupted'}")
    git("tag", "--annotate", f"v{version}", "--message", f"Version {version}")
    print(f"v{version} is tagged and built. To publish it:\n  git push origin main v{version}\n  twine upload dist/*")


if __name__ == "__main__":
    main()
