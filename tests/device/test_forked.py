"""Nothing opens a GPU before a run's workers are forked: those forked after could not open theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import CASES
from runs import PATIENCE

from fewbytes.base.errors import UserError
from fewbytes.core import devices


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


def test_a_gpu_that_no_forked_process_can_open_is_tried_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this process has asked CUDA something before."""
    here = os.getpid()
    monkeypatch.setattr(devices, "_tried", lambda device: "" if os.getpid() == here else "cannot be opened here")
    devices.check_device("cuda")
    monkeypatch.setattr(devices, "_tried", lambda device: "there is none")
    with pytest.raises(UserError, match=r"device 'cuda' .*none"):
        devices.check_device("cuda")
