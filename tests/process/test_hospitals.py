"""`examples/04_hospitals`: three sites over TLS, their own folders, a slow link, a restart in the middle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import PATIENCE

pytest.importorskip("flwr", reason="Flower is not installed")
EXAMPLE = Path(__file__).parents[2] / "examples" / "04_hospitals" / "run.py"


def test_three_hospitals_train_together_though_one_is_restarted(tmp_path):
    options = ["--part", "0.3", "--rounds", "5", "--evaluate-every", "5", "--out", str(tmp_path / "hospitals")]
    options += ["--rate", "5000"]  # seconds a round: who is restarted is back before the last
    done = subprocess.run([sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every image is used: " in done.stdout
    assert "south is down after round 2" in done.stdout
    assert "the exported model, in plain PyTorch and onnxruntime: " in done.stdout
    assert list((tmp_path / "hospitals" / "runs").glob("*/report.html"))
