"""Makes README's pictures: the front of a report and a terminal, each light and dark, of the comparison in README.

python scripts/pictures.py     # needs Chromium, by the name chromium, chromium-browser or google-chrome
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COMMAND = re.search(r"^fewbytes (compare (?:[^\\\n]|\\\n)*)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
COMPARE = COMMAND[1].replace("\\\n", "").split() if COMMAND else sys.exit("README has no fewbytes compare")
COLUMNS = 80
LIGHT = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [
        (36, 41, 47), (207, 34, 46), (17, 99, 41), (77, 45, 0),
        (9, 105, 218), (130, 80, 223), (27, 124, 131), (110, 119, 129),
    ],
)  # fmt: skip


def recorded(folder: Path) -> str:
    """What a terminal of 80 columns shows in the end of the comparison, with its colours."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "40"}
        os.execv(sys.executable, [sys.executable, "-m", "fewbytes", *COMPARE, "--out", str(folder)])
    text = b""
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        if not read:
            break
        text += read
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(text.decode())
    return text.decode()


def last_screen(text: str) -> list[str]:
    """Each line as it stood when it was left: a live line is drawn over itself."""
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    plain = {line: Text.from_ansi(line).plain.strip() for line in lines}
    kept = [line for line in lines if plain[line] and not plain[line].startswith(("note:", "report:"))]
    return [line.replace("\x1b[2K", "").replace("\x1b[?25l", "").replace("\x1b[?25h", "") for line in kept]


def draw_terminal(lines: list[str]) -> None:
    for name, theme in (("light", LIGHT), ("dark", DIMMED_MONOKAI)):
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
        console.print(Text.assemble(("$ ", "dim"), f"fewbytes {' '.join(COMPARE)}"), soft_wrap=False)
        for line in lines:
            console.print(Text.from_ansi(line))
        console.save_svg(str(PICTURES / f"terminal-{name}.svg"), title="fewbytes", theme=theme)


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
        draw_terminal(last_screen(recorded(folder / "runs")))
        draw_report(next((folder / "runs").glob("*/report.html")), folder)


if __name__ == "__main__":
    main()
