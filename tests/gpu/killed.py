"""A run on a GPU whose workers are killed from outside, or, once, the process that forks them; says how many were."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from cases import CASES, tiny_task
from laws.test_resuming import children
from runs import ROUNDS

import fewbytes as fb
from gpu.test_gpu import on_gpu


class Kill(fb.Watcher):
    replies, killed = 0, 0

    def __init__(self, mother: bool):
        self.mother = mother

    def replied(self, client):
        self.replies += 1
        mothers = children(os.getpid())
        chosen = (mothers if self.mother else [worker for mother in mothers for worker in children(mother)])[:1]
        if self.replies % 4 == 2 and chosen and not (self.mother and self.replies < 6):
            os.kill(chosen[0], signal.SIGKILL)
            self.killed += 1


if __name__ == "__main__":
    kill = Kill(sys.argv[2] == "mother")
    out = Path(sys.argv[1]) / sys.argv[2]
    try:
        fb.run(CASES["fedpurin"], on_gpu(tiny_task()), rounds=ROUNDS, out=out, workers=2, watcher=kill)
    except fb.UserError as error:
        print(error, file=sys.stderr)
    print(kill.killed)
