"""The example of adapters, as it stands but smaller."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from commands import fewbytes
from modules import needs
from runs import PATIENCE

needs("peft", "tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_adapters"


def test_a_language_model_is_trained_and_adapted(tmp_path):
    small = ["--steps", "5", "--width", "16", "--layers", "1", "--length", "32", "--tokens", "300"]
    small += ["--characters", "2000", "--packages", "numpy,torch", "--part", "0.02"]
    script = [sys.executable, EXAMPLE / "prepare.py", "--out", tmp_path, *small]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    done = fewbytes(
        "compare", "fedavg", "local_adapters:FedSA", "separate", "--dataset", str(tmp_path / "texts"), "--model",
        f"hf:{tmp_path / 'backbone'}", "--lora", "rank=2", "--length", "32", "--partition", "pathological",
        "--clients", "2", "--classes-per-client", "1", "--rounds", "1", "--out", str(tmp_path / "runs"), "--json",
        cwd=EXAMPLE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, shared, alone = [each["uplink_nominal_bytes"] for each in json.loads(done.stdout)]
    assert whole > shared > alone == 0
