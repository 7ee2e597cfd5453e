"""Makes the pictures of a report's front, light and dark, of the comparison in README.

python scripts/pictures.py     # needs Chromium, by the name chromium, chromium-browser or google-chrome
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COMMAND = re.search(r"^fewbytes (compare (?:[^\\\n]|\\\n)*)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
COMPARE = COMMAND[1].replace("\\\n", "").split() if COMMAND else sys.exit("README has no fewbytes compare")


def draw_report(page: Path, folder: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no Chromium is found: none of {', '.join(names)}")
    for name, scheme in (("light", 1), ("dark", 0)):
        shot = folder / f"{name}.png"
        subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-background-networking", f"--user-data-dir={folder / name}", "--virtual-time-budget=8000",
                "--window-size=1200,1000", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}",
                page.as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        Image.open(shot).convert("RGB").crop((0, 0, 1200, 870)).save(PICTURES / f"report-{name}.png", optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "fewbytes", *COMPARE, "--out", str(folder / "runs")], check=True)
        draw_report(next((folder / "runs").glob("*/report.html")), folder)


if __name__ == "__main__":
    main()
