"""The lines of servers and nodes have dates, and their files stay small."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to log", exc_type=ImportError)

from runs import PATIENCE

from fewbytes.flower.children import Child
from fewbytes.flower.dated_lines import FILE_BYTES, DatedLines, dated

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def ended(code: str, log: Path) -> Child:
    """A process that has ended."""
    child = Child([sys.executable, "-c", code], log.parent, log)
    child.process.wait(timeout=PATIENCE)
    child.reason()
    return child


def test_each_line_has_one_date(tmp_path):
    log = tmp_path / "log"
    ended("print('first\\n\\n2026-11-29 08:00:00 second'); print('last', end='')", log)
    assert re.fullmatch(rf"{DATE}first\n\n2026-11-29 08:00:00 second\n{DATE}last\n", log.read_text())


def test_a_log_takes_at_most_a_megabyte(tmp_path):
    log = tmp_path / "log"
    ended("for i in range(100_000): print(f'line {i}: ' + 50 * 'x')", log)
    ended("for i in range(100_000): print(f'again {i}: ' + 50 * 'x')", log)
    kept = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(kept) == 2
    assert FILE_BYTES < sum(kept) <= 1_000_000
    assert "again 99999: " in log.read_text().splitlines()[-1]


def test_the_reason_is_what_was_printed_last(tmp_path):
    log = tmp_path / "log"
    log.write_text("ERROR: of an earlier process\n")
    assert ended("print('ERROR: no space'); print('bye')", log).reason() == "ERROR: no space"
    assert ended("", log).reason() == "it said nothing"
    assert ended("import os; os.kill(os.getpid(), 9)", log).reason() == "killed by SIGKILL"


def test_what_is_no_text_is_kept_readable(tmp_path):
    log = tmp_path / "log"
    ended("import sys; sys.stdout.buffer.write(b'\\xff%s\\n' + 40_000 * b'y')", log)
    lines = log.read_text().splitlines()
    assert lines[0].endswith("\ufffd%s")
    assert max(map(len, lines)) < 20_000


def test_a_stream_dates_whole_lines():
    there = io.StringIO()
    stream = DatedLines(there)
    print("a", "b", file=stream)
    print("approve it? ", end="", file=stream)
    print("y\nlast", file=stream)
    assert re.fullmatch(rf"{DATE}a b\n{DATE}approve it\? y\n{DATE}last\n", there.getvalue())
    assert dated("") == ""
