"""`examples/08_language_model` under Flower, as it stands but smaller."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from flower_run import flower_run
from modules import needs
from printed_bytes import out_of
from safetensors.torch import load_file

needs("flwr", "ray", "peft", "transformers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "08_language_model"
SMALLER = "num-server-rounds=3 texts.characters=6000 lora.rank=4 lora.alpha=8"


def test_adapters_are_trained_at_half_a_bit(tmp_path):
    app, out = tmp_path / "app", tmp_path / "adapters"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    printed = flower_run(app, tmp_path, f'{SMALLER} out="{out}"', HF_HUB_OFFLINE="1")
    assert (out / "adapter_model.safetensors").exists(), printed
    adapters = load_file(out / "adapter_model.safetensors")
    assert all(value.isfinite().all() for value in adapters.values())
    assert all(torch.count_nonzero(value) for name, value in adapters.items() if "lora_B" in name)
    losses = [float(loss) for loss in re.findall(r"MetricRecord: {'eval_loss': ([0-9.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    moved = [pair for line in re.findall(r"fewbytes: (.*) up", printed) for pair in out_of(line)]
    assert len(moved) == 3
    assert all(plain > 20 * sent for sent, plain in moved)
    both = [float(times) for times in re.findall(r", ([\d.]+) times fewer bytes than plain", printed)]
    assert len(both) == 3
    assert min(both[1:]) > 10  # the first model travels whole
