"""The server's mean of 100 ResNet-18 updates, one after another: bytes averaged per second against copying them.

    python benchmarks/speed/aggregate.py [--updates 100]

One thread. The goal is 40 % of the machine's copy bandwidth with the memory of one model, not of a hundred.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import fewbytes as fb
from fewbytes.models import build_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100)
    updates = parser.parse_args().updates
    torch.set_num_threads(1)
    state = {k: v for k, v in fb.state_of(build_model("resnet18", (3, 32, 32), 10)).items() if v.is_floating_point()}
    size = sum(v.nbytes for v in state.values())
    source, target = torch.rand(size // 4), torch.empty(size // 4)
    target.copy_(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratios = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(updates):
            target.copy_(source)
        copied = time.perf_counter() - started
        mean = fb.Mean()
        started = time.perf_counter()
        for i in range(updates):
            mean.add(state, weight=i + 1)
        result = mean()
        averaged = time.perf_counter() - started
        ratios.append(copied / averaged)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert all(torch.allclose(result[k], state[k], rtol=1e-4, atol=1e-6) for k in state)
    print(f"copy {updates * size / copied / 1e9:.1f} GB/s, mean {updates * size / averaged / 1e9:.1f} GB/s, "
          f"ratio {sorted(ratios)[2]:.2f} (goal 0.40); memory grew by {grown / size:.1f} models")  # fmt: skip
