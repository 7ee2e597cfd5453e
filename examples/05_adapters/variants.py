"""The variants of LoRA, and rounding, on the example's task: bytes and perplexity of four rounds of FedAvg.

python prepare.py
python variants.py               # minutes a row; writes variants.json, and prints the table
python variants.py "core=xs"     # rows whose options contain the words, beside those in variants.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import fewbytes as fb
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

ROWS = [
    ("rank=8", None, 0.003),
    ("rank=8", 0.5, 0.003),
    ("rank=8,train=B", None, 0.003),
    ("rank=8,send=A", None, 0.003),
    ("rank=32,core=xs", None, 0.03),
    ("rank=32,core=xs", 2, 0.03),
    ("rank=32,core=xs", 1, 0.03),
    ("rank=32,core=xs", 0.5, 0.03),
]
"""Options, bits a value in both directions, and the learning rate."""
TASK = {
    "method": "fedavg", "dataset": "texts", "model": "hf:backbone", "length": 128, "partition": "pathological",
    "clients": 6, "classes_per_client": 1, "rounds": 4,
}  # fmt: skip
TRAINING = {"epochs": 1, "optimiser": "adam", "batch": 16}


def measured(lora: str, bits: float | None, lr: float, workers: int) -> dict[str, Any]:
    """One run: bytes of all clients in all rounds, and the last perplexities."""
    experiment = make_experiment(TASK | {"lora": lora, "parameters": TRAINING | {"lr": lr}})
    task = find(experiment).task
    rounding = {} if bits is None else {"uplink_bits": bits, "downlink_bits": bits}
    result = fb.run(experiment.build_method(), task, rounds=TASK["rounds"], workers=workers, **rounding)
    bytes_sent = result.ledger.totals()
    return {
        "values": sum(value.numel() for value in task.problem.first_state().values()),
        "up": bytes_sent["uplink_bytes"],
        "down": bytes_sent["downlink_bytes"],
        "perplexity": result.rounds[-1]["scores"]["perplexity"],
    }


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown, beside the first, ordinary LoRA without loss."""
    lines = [
        "| `--lora` | bits | lr | values trained | kB up | kB down | kB both "
        "| times fewer bytes than the first row, both | clients | server |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    first = found[key(*ROWS[0])]
    for lora, bits, lr in ROWS:
        if (row := found.get(key(lora, bits, lr))) is None:
            continue
        total = row["up"] + row["down"]
        sizes = " | ".join(f"{size / 1000:,.1f}" for size in (row["up"], row["down"], total))
        times = (first["up"] + first["down"]) / total
        scores = " | ".join(f"{row['perplexity'][k]:.1f}" if k in row["perplexity"] else "" for k in KINDS)
        lines.append(f"| `{lora}` | {bits or ''} | {lr} | {row['values']:,} | {sizes} | {times:.1f} | {scores} |")
    return "\n".join(lines)


KINDS = ("personalised", "global")


def key(lora: str, bits: float | None, lr: float) -> str:
    return f"{lora} bits={bits} lr={lr}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="?", default="", help="in the options of rows to run")
    parser.add_argument("--out", type=Path, default=Path("variants.json"))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for row in ROWS:
        if given.words in key(*row):
            found[key(*row)] = measured(*row, workers=given.workers)
            given.out.write_text(json.dumps(found, indent=2) + "\n")
            print(key(*row), found[key(*row)], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
