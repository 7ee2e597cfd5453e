"""Whether the bytes a run reports are those it sends: kept frames, and sockets of a real deployment."""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import pyarrow.parquet as pq
from cases import CASES, task_of
from flower_grid import run
from proxied import deploy

import fewbytes as fb
from fewbytes.experiments.settings import make_experiment

logging.getLogger("flwr").setLevel(logging.CRITICAL)
warnings.simplefilter("ignore")
METHODS = "fedavg", "fedpurin", "fedkd", "dgc", "fedproto"


def frames(rounds: int) -> list[Figure]:
    """Row 25: every frame of so many rounds kept as a file, by both engines, beside the ledger's sums."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for engine in ("local", "flower"):
            said = held = 0
            for method in METHODS:
                place = Path(name) / engine / method / "run"
                if engine == "local":
                    fb.run(CASES[method], task_of(method), rounds=rounds, out=place, keep_frames=True, workers=1)
                else:
                    run(method, place, policy=fb.Policy(round_timeout=60), rounds=rounds, keep_frames=True)
                rows = pq.read_table(place / "ledger.parquet").to_pylist()
                said += sum(row["bytes_up"] + row["bytes_down"] for row in rows)
                held += sum(path.stat().st_size for path in (place / "frames").iterdir())
            what = f"{len(METHODS)} methods, {engine}: {said:,} bytes in the ledger; frames kept"
            found.append(Figure(what, f"{held:,} bytes", "within 0.1 %", abs(held - said) <= 0.001 * said))
    return found


def sockets(rounds: int) -> list[Figure]:
    """Row 25: a deployment of ResNet-8 on the digits over TLS, each node's bytes counted by a proxy."""
    settings = {
        "method": "fedavg", "dataset": "digits", "clients": 2, "samples": "40/10", "model": "resnet8", "rounds": rounds,
        "evaluate_every": 1000, "save_models": False, "parameters": {"epochs": 1, "lr": 0.05, "batch": 20},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        seen = deploy(make_experiment(settings), Path(name))
        ledger = pq.read_table(Path(name) / "run" / "ledger.parquet").to_pylist()
    said = sum(row["bytes_up"] + row["bytes_down"] for row in ledger)
    passed = sum(sum(proxy.snapshot()) for proxy in seen.proxies)
    return [
        Figure(
            f"{said:,} bytes in the ledger of a deployment: further bytes on sockets, from the nodes' start "
            "to their end: TLS, HTTP, polls, the application",
            f"{passed - said:,} bytes ({(passed - said) / said:.1%})",
            "counted separately",
            None,
        )
    ]
