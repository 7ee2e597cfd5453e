"""What hostile bytes do to the decoder."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "wire"))

import test_wire
from tampering import accepted, tampered
from test_wire import bombs, cases

from fewbytes.base.errors import FrameError


def fuzzed(count: int) -> list[Figure]:
    """Row 1: so many frames for each kind of value that lie in some way, with all checksums true."""
    rng, refused, crashed, wrong, slowest = random.Random(1), 0, 0, 0, 0.0
    gc.collect()
    gc.freeze()  # else a collection of all that was imported before falls into the time of a frame
    for name in cases():
        for _ in range(count):
            case, frame = tampered(name, rng.randbytes(rng.randrange(1, 120)))
            started = time.thread_time()
            try:
                case.unpack(frame, limit=1 << 20)
            except FrameError:
                refused += 1
            except Exception as error:
                crashed += 1
                print(f"{name}: {error!r}", file=sys.stderr)
            slowest = max(slowest, time.thread_time() - started)
            try:
                accepted(case, frame)
            except AssertionError:
                wrong += 1
            except Exception:
                pass  # has been counted
    total = count * len(cases())
    return [
        Figure(
            f"malformed frames, {count:,} for each of {len(cases())} kinds",
            f"{crashed} crashes, {wrong} silently wrong, {refused / total:.0%} refused; "
            f"the slowest took {1e3 * slowest:.1f} ms of a core",
            "0 crashes, 0 silently wrong, each under 100 ms",
            not crashed and not wrong and slowest < 0.1,
        )
    ]


def damaged(_: int) -> list[Figure]:
    """Row 2: a frame of about 2 kB cut off at every byte, and with every bit flipped."""
    case = max((case for case in cases().values() if len(case.frame) < 2100), key=lambda case: len(case.frame))
    frames = [case.frame[:length] for length in range(len(case.frame))]
    for i, byte in enumerate(case.frame):
        frames += [case.frame[:i] + bytes([byte ^ 1 << bit]) + case.frame[i + 1 :] for bit in range(8)]
    refused = 0
    for frame in frames:
        try:
            case.unpack(frame)
        except FrameError:
            refused += 1
    return [
        Figure(
            f"truncations and flipped bits of a frame of {len(case.frame):,} bytes",
            f"{refused:,} of {len(frames):,} refused",
            "all",
            refused == len(frames),
        )
    ]


def bombed(_: int) -> list[Figure]:
    """Row 3: small frames that would take much memory or time, in a process of its own with 8 MiB to spare."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, test_wire.__file__]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    if ran.returncode:
        print(ran.stderr, file=sys.stderr)
    slowest = max((row["ms"] for row in rows), default=0)
    grown = max((row["grown_kB"] for row in rows), default=0) / 1024
    return [
        Figure(
            f"bombs of {len(bombs())} kinds",
            f"{len(rows)} refused, the slowest in {slowest:.1f} ms of a core, with at most {grown:.2f} MiB more memory",
            "all refused, in 5 ms, with 1 MiB",
            len(rows) == len(bombs()) and slowest < 5 and grown < 1,
        )
    ]
