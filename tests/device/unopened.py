"""Every case begins a run on a GPU that is not there, up to where workers are forked; says which could not open one."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path

import torch
from cases import CASES, task_of

import fewbytes as fb
from fewbytes.core import devices
from fewbytes.engines import local
from fewbytes.experiments.prepared import PreparedRun


class Forked(Exception):
    """Whether a process forked here may open a GPU."""


def pool(*_: object) -> None:
    pid = os.fork()
    if not pid:
        os._exit(torch._C._cuda_isInBadFork())
    raise Forked(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0)


def may(begin) -> str:
    try:
        begin()
    except Forked as forked:
        return "may" if forked.args[0] else "may not"
    except Exception as error:
        return str(error)
    return "forked nothing"


def of_the_command_line() -> None:
    asked = {"method": "fedkgf", "device": "cuda", "dataset": "digits", "model": "resnet8", "workers": 2}
    with tempfile.TemporaryDirectory() as folder:
        PreparedRun(asked).execute(Path(folder) / "run", False)


if __name__ == "__main__":
    devices._why_not = lambda device: ""
    local.WorkerPool = pool
    found = {"the command line": may(of_the_command_line)}
    for name, method in CASES.items():
        task = task_of(name)
        problem = dataclasses.replace(task.problem, device="cuda")
        task = dataclasses.replace(task, problem=problem)
        found[name] = may(functools.partial(fb.run, method, task, rounds=1, workers=2))
    print(json.dumps(found))
