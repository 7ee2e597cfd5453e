"""`examples/09_consortium`: members come, go and get new keys, and the server moves, in a running deployment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import PATIENCE

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

EXAMPLE = Path(__file__).parents[2] / "examples" / "09_consortium" / "year.py"


def test_a_year_of_a_federation(tmp_path):
    """On network namespaces, or on loopback where none can be made."""
    place = tmp_path / "consortium"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--out", str(place)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    months = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert months[-7:] == ["January", "March", "May", "July", "August", "October", "December"]
    history = (place / "server" / "federation" / "history.jsonl").read_text().splitlines()
    what = [json.loads(line)["what"] for line in history]
    assert (what.count("joined"), what.count("replaced"), what.count("removed"), what.count("renewed")) == (4, 1, 1, 2)
    assert "Traceback" not in "".join(log.read_text() for log in place.glob("*.log"))
