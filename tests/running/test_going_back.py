"""A run keeps its last checkpoints: it can go back to one, and a damaged one loses a round, not the run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cases import CASES, COME_AND_GO, scheduled_task, task_of, tiny_task
from runs import ROUNDS, fingerprint

import fewbytes as fb
from fewbytes.running.checkpoint import Checkpoints

KEPT = ["fedpurin", "fedkd", "fedavg", "scaffold"]  # states, messages that wait, no states, states at both ends


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, Path]:
    """Runs of KEPT that are done and have every checkpoint."""
    folders = {name: tmp_path_factory.mktemp("kept") / name for name in KEPT}
    for name, out in folders.items():
        fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=out, workers=1, keep_checkpoints=9)
    return folders


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.mark.parametrize("name", KEPT)
def test_from_any_earlier_round_it_ends_the_same(name, finished, uninterrupted, tmp_path):
    for t in range(ROUNDS):
        run = copied(finished[name], tmp_path / str(t))
        fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=run, workers=1, resume=True, from_round=t)
        assert fingerprint(run) == uninterrupted(name)


def test_clients_that_came_later_come_again(scheduled, tmp_path):
    def run(**settings):
        fb.run(
            COME_AND_GO["greeting"], scheduled_task(), rounds=ROUNDS, out=tmp_path / "run", keep_checkpoints=9,
            workers=1, **settings,
        )  # fmt: skip

    run()
    for t in (1, 2):
        run(resume=True, from_round=t)
        assert fingerprint(tmp_path / "run") == scheduled("greeting")


def test_nothing_tells_of_the_rounds_it_went_back_over(finished, tmp_path):
    run = copied(finished["fedpurin"], tmp_path / "run")
    seen = {}

    class Stop(fb.Watcher):
        def started(self, folder, rounds, done):
            seen["rows"] = [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
            seen["files"] = {path.name for path in folder.iterdir()}
            seen["checkpoints"] = Checkpoints(folder).rounds()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, resume=True, from_round=2, watcher=Stop())
    assert max(seen["rows"]) == 2
    assert not seen["files"] & {"result.json", "ledger.parquet"}
    assert seen["checkpoints"] == [0, 1, 2]


def test_the_last_two_rounds_and_their_states_are_kept(tmp_path):
    run = tmp_path / "run"
    fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, workers=1)
    assert Checkpoints(run).rounds() == [ROUNDS - 1, ROUNDS]
    versions = [Checkpoints(run).read(t).named() for t in Checkpoints(run).rounds()]
    states = {f"{client}-{version}.state" for each in versions for client, version in each.items()}
    assert {path.name for path in (run / "checkpoint" / "clients").iterdir()} == states
    with pytest.raises(fb.UserError, match=r"checkpoint of round 1 .*3 and 4"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, resume=True, from_round=1)
    with pytest.raises(fb.UserError, match=r"from_round .*at least 0"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, resume=True, from_round=-1)
    with pytest.raises(fb.UserError, match=r"from_round .*resume"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=tmp_path / "new", from_round=1)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b""])
def test_a_torn_checkpoint_falls_back_to_the_one_before_with_a_note(damage, finished, uninterrupted, tmp_path):
    run = copied(finished["fedpurin"], tmp_path / "run")
    last = Checkpoints(run).path(ROUNDS)
    last.write_bytes(damage(last.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(last))} is damaged: .*round {ROUNDS - 1}"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, workers=1, resume=True)
    assert fingerprint(run) == uninterrupted("fedpurin")


@pytest.mark.parametrize("name", ["ledger", "rows"])
def test_torn_exchanges_lose_the_rounds_they_were_of_and_what_is_half_written_is_cut_off(
    name, finished, uninterrupted, tmp_path
):
    run = copied(finished["fedpurin"], tmp_path / "run")
    path = run / "checkpoint" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match=f"is damaged: .*round {ROUNDS - 1}"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, workers=1, resume=True)
    assert fingerprint(run) == uninterrupted("fedpurin")
    for t in Checkpoints(run).rounds()[1:]:
        Checkpoints(run).path(t).unlink()
    path.write_bytes(path.read_bytes() + b"half-written")
    fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, workers=1, resume=True)
    assert fingerprint(run) == uninterrupted("fedpurin")
    path.write_bytes(b"")
    with pytest.raises(fb.UserError, match=f"{name} is damaged"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, resume=True)


def test_what_a_round_writes_does_not_grow_with_the_rounds_before_it(tmp_path):
    run = tmp_path / "run"
    sizes = []

    class Sizes(fb.Watcher):
        def scored(self, row):
            sizes.append(Checkpoints(run).path(row["round"]).stat().st_size)

    fb.run(CASES["fedavg"], tiny_task(), rounds=12, out=run, workers=1, watcher=Sizes())
    assert max(sizes[1:12]) - min(sizes[1:12]) < 64
    assert [json.loads(line) for line in (run / "checkpoint" / "rows").read_text().splitlines()] == [
        json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()
    ]


def test_a_missing_checkpoint_loses_a_round_and_without_any_whole_one_the_run_is_lost(finished, tmp_path):
    run = copied(finished["fedpurin"], tmp_path / "run")
    Checkpoints(run).path(ROUNDS).unlink()
    result = fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, workers=1, resume=True)
    assert result.summary["rounds"] == ROUNDS
    for t in Checkpoints(run).rounds():
        Checkpoints(run).path(t).write_bytes(b"torn")
    with pytest.raises(fb.UserError, match="damaged"):
        fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=run, resume=True)


def test_a_client_state_that_is_gone_says_how_to_go_on(finished, uninterrupted, tmp_path):
    run = copied(finished["fedpurin"], tmp_path / "run")
    version = Checkpoints(run).read(ROUNDS).named()[1]
    (run / "checkpoint" / "clients" / f"1-{version}.state").unlink()
    again = {"rounds": ROUNDS, "out": run, "workers": 1, "resume": True}
    with pytest.raises(fb.UserError, match=r"client 1's state .*earlier round"):
        fb.run(CASES["fedpurin"], tiny_task(), **again)
    fb.run(CASES["fedpurin"], tiny_task(), **again, from_round=ROUNDS - 1)
    assert fingerprint(run) == uninterrupted("fedpurin")
