"""Every method, and what else computes with tensors, keeps all of them on the task's device, and gives there what it
gives on the CPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import PATIENCE

from device.placed import ANALYSES, FAULTS, METHODS, OBJECTIVES, SETTINGS, TRANSFORMS

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch takes no device that is written in Python",
)
OTHERS = [*TRANSFORMS, *OBJECTIVES, *SETTINGS, *ANALYSES]
GROUPS = [[*METHODS][::2], [*METHODS][1::2], [*OTHERS, *FAULTS]]
"""Cases that share a process, which takes longer to start than most of them."""
NEEDS = {"boxes": "yolox", "lora": "peft", "private": "dp_accounting"}


@functools.cache
def told(group: int) -> dict[str, dict]:
    """Of each case of a group, by name, what differs on the two devices, or the error it ended in."""
    done = subprocess.run(
        [sys.executable, "-m", "device", *GROUPS[group]],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # of autograd's threads, too: more add in another order
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ended = {"error": f"the process ended with {done.returncode}\n{done.stderr}"}
    return dict.fromkeys(GROUPS[group], ended) | {row["case"]: row for row in rows}


def case(name: str) -> dict:
    return told(next(i for i, names in enumerate(GROUPS) if name in names))[name]


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_a_device_gives_what_the_cpu_gives(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    found = case(name)
    assert "error" not in found, found["error"]
    assert found["differ"] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_tensor_of_another_device_is_found(name: str) -> None:
    wanted = {
        "numpy": "can't convert pretend:0 device type tensor to numpy",
        "generator": "Expected a 'pretend' device type for generator but found 'cpu'",
    }
    mixed = "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu!"
    assert wanted.get(name, mixed) in case(name).get("error", "")
