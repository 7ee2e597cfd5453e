"""Seconds from the command to the first round, whole processes: `fewbytes run` less the rounds it reports.

python benchmarks/speed/startup.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

if __name__ == "__main__":
    sets = ["digits", *(name for name in ("mnist", "cifar10") if os.environ.get("FEWBYTES_DATA"))]
    for dataset in sets:
        times = []
        for _ in range(4):
            command = [sys.executable, "-m", "fewbytes", "run", "fedavg", "--dataset", dataset, "--rounds", "1",
                       "--samples", "20/5", "--evaluate-every", "9", "--json", "--no-models"]  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
                times.append(time.perf_counter() - started - json.loads(done.stdout)["seconds"])
        print(f"{dataset}: {sorted(times[1:])[1]:.2f} s (first time, with cold caches: {times[0]:.2f} s; goal 5 s)")
