"""A run that is killed leaves no workers, and ends, resumed, as if it had never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROUNDS, fingerprint, until

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from cases import CASES, tiny_task
import fewbytes as fb
class Tell(fb.Watcher):
    def replied(self, client):
        print(client, flush=True)
fb.run(CASES[sys.argv[2]], tiny_task(), rounds=int(sys.argv[3]), out=sys.argv[4], workers=2, watcher=Tell(),
       resume=len(sys.argv) > 5)
"""


@pytest.mark.parametrize("name", ["fedavg-local-buffers", "fedpurin"])
@pytest.mark.parametrize("replies", [1, 6, 10])
def test_kill_minus_nine_of_the_whole_run(name, replies, uninterrupted, tmp_path):
    here = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-c", SCRIPT, here, name, str(ROUNDS), str(tmp_path / "run")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    for _ in range(replies):
        process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    process.stdout.close()
    gone = until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), every=0.02)
    assert gone, "workers outlived their run"
    subprocess.run([*arguments, "resume"], check=True, stdout=subprocess.DEVNULL)
    assert fingerprint(tmp_path / "run") == uninterrupted(name)
