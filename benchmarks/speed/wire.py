"""The wire on a dense ResNet-18 (11.2 million float32 values), one thread: MB of raw float32 per second, and sizes.

    python benchmarks/speed/wire.py [--repeats 7]

Encoding writes the frame into memory that is used again; decoding ends in tensors. Beside it, in the same run:
copying the same bytes, and safetensors. The update is ten SGD steps on random images away from its base.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from safetensors.torch import load, save

import fewbytes as fb
from fewbytes.models import build_model
from fewbytes.wire import Layout, base_of

GOALS = {"uncoded": (2000, 2000), "coded": (300, 800)}


@fb.payload
class Update:
    theta: fb.Dense


def best(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def main(repeats: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model("resnet18", (3, 32, 32), 10)
    before = fb.state_of(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(10):
        optimiser.zero_grad()
        F.cross_entropy(model(torch.rand(8, 3, 32, 32)), torch.randint(0, 10, (8,))).backward()
        optimiser.step()
    after = fb.state_of(model)
    layout, update = Layout.of(after), Update(fb.Dense(after))
    message = Update(fb.Dense(before))
    base = base_of(fb.pack(message, layout=layout).digest, message)
    raw = sum(v.nbytes for v in after.values())
    buffer = memoryview(bytearray(raw + (1 << 20)))
    flat = torch.cat([v.reshape(-1).view(torch.uint8) for v in after.values()]).numpy()

    def report(name: str, encode: float, decode: float, size: int) -> None:
        goal = GOALS.get(name)
        goals = f"  goals {goal[0]} / {goal[1]}" if goal else ""
        print(f"{name:12} encode {raw / encode / 1e6:6.0f} MB/s  decode {raw / decode / 1e6:6.0f} MB/s"
              f"  {size / raw:.4f} of raw{goals}")  # fmt: skip

    copy = best(lambda: buffer[: len(flat)].__setitem__(slice(None), memoryview(flat)), repeats)
    report("memcpy", copy, copy, raw)
    blob = save(after)
    report("safetensors", best(lambda: save(after), repeats), best(lambda: load(blob), repeats), len(blob))
    for name, options in {"uncoded": {"coded": False}, "coded": {}, "with base": {"base": base}}.items():
        frame = bytes(fb.pack(update, layout=layout, **options))
        back = fb.unpack(Update, frame, layout=layout, base=base)
        assert all(torch.equal(back.theta.state[k], v) for k, v in after.items())
        encode = best(lambda o=options: fb.pack(update, layout=layout, **o).write_into(buffer), repeats)
        decode = best(lambda f=frame: fb.unpack(Update, f, layout=layout, base=base), repeats)
        report(name, encode, decode, len(frame))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    main(parser.parse_args().repeats)
