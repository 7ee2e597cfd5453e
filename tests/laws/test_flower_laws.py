"""Flower's engine is the local one, in memory, also where the server stops in the middle of rounds and is resumed."""

from __future__ import annotations

import logging

import pytest
from cases import CASES
from runs import ROUNDS, fingerprint

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import left_out, rounds_of, run


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", CASES)
def test_flower_is_the_local_engine(name, uninterrupted, tmp_path):
    run(name, tmp_path / "run")
    assert fingerprint(tmp_path / "run") == uninterrupted(name)
    assert {outcome for *_, outcome in left_out(tmp_path / "run")} <= {"surplus"}  # of a stream, when the run ends


@pytest.mark.parametrize("name", [name for name in CASES if name != "separate"])
def test_a_server_that_stops_early_and_late_is_resumed(name, uninterrupted, tmp_path):
    class Stop(fb.Watcher):
        def replied(self, client):
            if client == 1 and len(rounds_of(tmp_path / "run")) >= after:
                raise RuntimeError("the server's process dies in the middle of a round")

    last = CASES[name].planned_rounds(ROUNDS) - 1
    stops = sorted({min(1, last), last})
    for after in stops:
        with pytest.raises(RuntimeError, match="in the middle"):
            run(name, tmp_path / "run", watcher=Stop(), resume=after > stops[0])
    run(name, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == uninterrupted(name)
