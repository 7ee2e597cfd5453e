"""Names of strangers' classes, columns, folders and methods on the terminal, in a report and beside exported models."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from commands import fewbytes
from PIL import Image
from rich.table import Table
from rich.text import Text

from fewbytes.base.errors import visible
from fewbytes.experiments.display import Visible
from fewbytes.models.export_readme import readme

STEERS = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e"
"""What renames a terminal's window, clears it, colours it, goes back in its line, turns text around."""
TAG = "<img src=x onerror=alert(1)>"  # no / in it, for names of folders


def harmless(text: str) -> bool:
    return not set(text) & set(STEERS) - set(STEERS).intersection("]0;owned[2J31m")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes, each with a name that steers and marks up."""
    folder = tmp_path / f"data{STEERS}"
    for name in ("cat", "dog", "fox"):
        (folder / f"{STEERS}{name}{TAG}").mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8), ord(name[0]) + i).save(folder / f"{STEERS}{name}{TAG}" / f"{i}.png")
    return folder


def test_a_run_its_report_and_its_export_show_strange_names_as_text(folder, tmp_path):
    done = fewbytes("run", "fedavg", "--dataset", folder, "--clients", "2", "--rounds", "1", "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert harmless(done.stdout + done.stderr)
    (run,) = (tmp_path / "runs").iterdir()
    page = (run / "report.html").read_bytes().decode()
    assert harmless(page)
    assert TAG not in page
    assert "cat&lt;img" in page  # control: it is there, as text
    assert "&amp;lt;" not in page
    exported = fewbytes("export", run, "--safetensors")
    assert exported.returncode == 0, exported.stderr
    assert harmless((run / "export" / "README.md").read_text() + exported.stdout + exported.stderr)


def test_an_error_that_names_a_strange_file_or_column_is_one_harmless_line(folder, tmp_path):
    (folder / f"{STEERS}dog{TAG}" / f"a{STEERS}.png").write_bytes(b"no image")
    (tmp_path / "a.csv").write_text(f"label,age{STEERS.replace(chr(13), '')}\n" + "a,\nb,2\n" * 20)
    for place, words in ((folder, "is not a readable image"), (tmp_path / "a.csv", "age")):
        done = fewbytes("run", "fedavg", "--dataset", place, "--clients", "2", "--rounds", "1", "--out", tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
        assert harmless(done.stderr)


def test_a_console_shows_its_own_colours_and_nobody_elses():
    file = io.StringIO()
    console = Visible(file=file, force_terminal=True, color_system="standard", markup=False, width=60)
    table = Table(f"head{STEERS}")
    table.add_row(Text(f"cell{STEERS}", "red"))
    console.print(f"text{STEERS}\nsecond line\tof it", table)
    written = file.getvalue()
    assert "\x1b[31mcell" in written  # control: that is ours
    assert harmless(re.sub(r"\x1b\[[0-9;]*m", "", written))
    assert "second line" in written


def test_what_is_visible_is_kept_as_it_is():
    text = "Zürich, Иван, 東京\u3000,\u00a0±1 → \n\tnext"
    assert visible(text) == text
    assert harmless(visible(STEERS))


def test_a_readme_of_an_export_shows_names_of_a_strangers_file_as_text_and_none_as_code():
    tensor = {"shape": ["n", 3], "dtype": "float32"}
    said = {
        "model": "global", "method": f"{STEERS}{TAG}[here](javascript:x)`", "architecture": f"{STEERS}{TAG}",
        "learns": "numbers", "classes": [], "table": None, "text": None, "normalise": None, "torch": "2.0",
        "files": ["model.onnx", "model.safetensors"],
        "input": {
            **tensor, "tensors": {'x": evil(), "y': tensor, f"{TAG}": tensor}, "pixels_divided_by": None,
            "image_size": None,
        },
    }  # fmt: skip
    text = readme(said)
    words, code, *_ = text.split("```python\n")
    assert harmless(text)
    assert "<img" not in words
    assert r"\[here\](javascript:x)\`" in words
    lines = code.partition("```")[0].replace("onnxruntime.InferenceSession", "Session")
    ran = []

    class Session:
        def __init__(self, name: str) -> None:
            pass

        def run(self, _: None, given: dict[str, object]) -> list[object]:
            ran.append(sorted(given))
            return [0]

    here = {"evil": lambda: ran.append("evil"), "Session": Session}
    exec(lines.replace("import numpy, onnxruntime", "import numpy"), here)  # what users run
    assert ran == [sorted(['x": evil(), "y', TAG])]


def test_a_warning_of_a_strange_name_steers_nothing(tmp_path):
    (tmp_path / "own.py").write_text(
        "import fewbytes as fb, warnings\nfrom fewbytes.base.errors import LikelyMistake\n"
        f"warnings.warn(LikelyMistake({STEERS!r}))\nwarnings.warn({STEERS!r})\nclass Own(fb.FedAvg): pass\n"
    )
    done = fewbytes("methods", "own:Own", cwd=tmp_path)
    assert "owned" in done.stderr
    assert harmless(done.stdout + done.stderr)
