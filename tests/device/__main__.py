"""Run cases on both devices, in a process of their own: a line of JSON for each of those named."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from device.pretence import NAME, set_up
from fewbytes.analysis import probe
from fewbytes.core import detection, objective, problem, training
from fewbytes.engines import local
from fewbytes.experiments import tasks


def main() -> None:
    torch.set_num_threads(1)
    set_up()
    problem.check_device = tasks.check_device = lambda device: None  # it knows no pretended one
    local.WorkerPool = lambda *_: None  # clients of both runs in this process
    for module in (training, objective, probe):
        module.EVALUATION_BATCH = 16  # so that few samples are several batches
    detection.BATCH = 3
    from device.placed import differing

    for name in sys.argv[1:]:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                told = {"differ": differing(name, Path(folder), NAME)}
            except Exception:
                told = {"error": traceback.format_exc()}
        print(json.dumps({"case": name, "seconds": round(time.monotonic() - begun, 2), **told}), flush=True)


main()
