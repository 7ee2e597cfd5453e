"""The command of a comparison with PFLlib or HtFLlib: both sides, with equal batches and then three seeds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROUNDS, SAME_LR, SAME_ROUNDS, SEEDS, Outcome, Row, apart, record, run_ours, task_of
from page import interval
from tsingz0 import Watch, commit_of, run_theirs


@dataclass(frozen=True)
class Peer:
    """A library: its name, what is compared, what is replaced in it, what watches it, its options for all methods."""

    name: str
    methods: Mapping[str, Row]
    patches: Callable[[Watch], Iterator[Any]]
    watch: type[Watch] = Watch
    options: tuple[str, ...] = ()
    seeds: bool = True  # whether it also runs as it is

    def run(self, checkout: Path, watch: Watch, options: tuple[str, ...] = ()) -> Outcome:
        return run_theirs(checkout, watch, (*self.options, *options), self.patches)


def main(peer: Peer, usage: str | None) -> None:
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{peer.name}", metavar="PATH", type=Path, required=True, help="a checkout of the peer")
    parser.add_argument("names", nargs="*", metavar="NAME", help="these methods alone")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--same", action="store_true", help="only with equal batches")
    parts.add_argument("--seeds", action="store_true", help="only the three seeds")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in peer.methods]:
        raise SystemExit(f"there is no {unknown[0]!r} here: {', '.join(peer.methods)}")
    if asked.seeds and not peer.seeds:
        raise SystemExit(f"{peer.name} only runs with equal batches: leave --seeds out")
    checkout: Path = getattr(asked, peer.name)
    commit = commit_of(checkout)
    sys.path.insert(0, str((checkout / "system").resolve()))
    torch.set_num_threads(1)
    for name in asked.names or peer.methods:
        row, began = peer.methods[name], time.monotonic()
        found: dict[str, Any] = {}
        if not asked.seeds:
            found |= same_batches(peer, row, checkout)
        if not asked.same and peer.seeds:
            found["seeds"] = [with_seed(peer, row, checkout, seed) for seed in SEEDS]
        record(peer.name, commit, name, found)
        print(f"{name}: {said(found)}, {time.monotonic() - began:.0f} s", flush=True)


def same_batches(peer: Peer, row: Row, checkout: Path) -> dict[str, Any]:
    """How far the two sides' models are apart after `SAME_ROUNDS` rounds on the same batches, and their scores there.

    At half of the learning rate: training at a high one makes the difference of two roundings a thousand times larger.
    """
    if row.same is None:
        return {"same": None}
    changes, options = row.same
    task = task_of(row, seed=1, same=True)
    ours = run_ours(row, task, SAME_ROUNDS, **{"order": "stored", "lr": SAME_LR, **changes})
    watch = peer.watch(row, task, SAME_ROUNDS, seed=1, same=True)
    theirs = peer.run(checkout, watch, ("-lr", str(SAME_LR), *options))
    distance = float(f"{apart(ours, theirs):.2g}")
    return {"same": distance, "same_scores": scores(ours, theirs), "changed": row.changed}


def with_seed(peer: Peer, row: Row, checkout: Path, seed: int) -> dict[str, list[float]]:
    """Both sides' scores `sent` and `trained`, ours first; each shuffles as it does."""
    task = task_of(row, seed, same=False)
    ours = run_ours(row, task, ROUNDS)
    theirs = peer.run(checkout, peer.watch(row, task, ROUNDS, seed, same=False))
    return scores(ours, theirs)


def scores(ours: Outcome, theirs: Outcome) -> dict[str, list[float]]:
    """Both ways of scoring, ours first."""
    return {way: [round(getattr(side, way), 5) for side in (ours, theirs)] for way in ("sent", "trained")}


def said(found: Mapping[str, Any]) -> str:
    parts = [f"same batches {found['same']} {found.get('same_scores', '')}"] if "same" in found else []
    for way in ("sent", "trained") if "seeds" in found else ():
        mean, half = interval([a - b for a, b in (seed[way] for seed in found["seeds"])])
        parts.append(f"{way} {100 * mean:+.1f} ± {100 * half:.1f} points")
    return ", ".join(parts)
