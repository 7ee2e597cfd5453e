"""Nothing opens a GPU before a run's workers are forked: those forked after could not open theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cases import CASES
from runs import PATIENCE


def test_workers_of_every_method_may_open_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "device.unopened"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(["the command line", *CASES], "may")
