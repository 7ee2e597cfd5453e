"""A run on a GPU whose workers, and the process that forks them, are killed from outside; says how many were."""

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

    def replied(self, client):
        self.replies += 1
        mothers = children(os.getpid())
        chosen = (mothers if self.killed % 2 else [worker for mother in mothers for worker in children(mother)])[:1]
        if self.replies % 4 == 2 and chosen:
            os.kill(chosen[0], signal.SIGKILL)
            self.killed += 1


if __name__ == "__main__":
    kill = Kill()
    fb.run(
        CASES["fedpurin"], on_gpu(tiny_task()), rounds=ROUNDS, out=Path(sys.argv[1]) / "killed", workers=2, watcher=kill
    )
    print(kill.killed)
