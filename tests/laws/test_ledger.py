"""The ledger is honest: the bytes of the frames that were packed, and of the payloads what the method's text states."""

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest
from cases import CASES, COSTS, task_of
from costs import Exchange
from runs import ROUNDS, fingerprint

import fewbytes as fb


def is_the_bytes_of_the_frames(result: fb.Result, folder) -> None:
    columns = result.ledger.columns()
    sizes = {p.stem: p.stat().st_size for p in (folder / "frames").glob("*")} if result.ledger else {}
    for i in range(len(result.ledger)):
        stem = f"{columns['round'][i]}-{result.ledger.handlers[columns['handler'][i]]}-{columns['client'][i]}"
        assert columns["bytes_up"][i] == sizes.get(f"{stem}-up", 0)
        call, _, client = stem.rpartition("-")
        waited = [size for name, size in sizes.items() if fnmatch(name, f"{call}.*-{client}-down")]
        assert columns["bytes_down"][i] == sizes.get(f"{stem}-down", 0) + sum(waited)
    totals = result.ledger.totals()
    assert totals["uplink_bytes"] == sum(v for k, v in sizes.items() if k.endswith("up"))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert sum(row["downlink_bytes"] for row in rows) == totals["downlink_bytes"] == result.summary["downlink_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_the_bytes_of_the_frames(name, reference):
    run = reference(name)
    is_the_bytes_of_the_frames(run.result, run.folder)


@pytest.mark.parametrize("name", CASES)
def test_coding_changes_bytes_and_nothing_else(name, reference, tmp_path):
    coded, folder = reference(name), tmp_path / "run"
    result = fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=folder, workers=1, keep_frames=True, coded=False)
    is_the_bytes_of_the_frames(result, folder)
    plain = fingerprint(folder)
    for what in ("server", "states", "models", "gallery"):
        assert plain[what] == coded.left[what]
    for one, other in zip(result.rounds, coded.result.rounds, strict=True):
        assert [one.get(key) for key in ("scores", "loss")] == [other.get(key) for key in ("scores", "loss")]
    columns, others = result.ledger.columns(), coded.result.ledger.columns()
    for column in columns:
        assert column in ("bytes_up", "bytes_down") or (columns[column] == others[column]).all()


def counted(run) -> list[tuple[Exchange, dict[str, int]]]:
    """Every exchange of a run, and its columns in the ledger, in order."""
    columns = {name: values.tolist() for name, values in run.result.ledger.columns().items()}
    found, before = [], {}
    for i, client in enumerate(columns["client"]):
        line = {name: values[i] for name, values in columns.items()}
        handler = run.result.ledger.handlers[line["handler"]]
        found.append((Exchange(line["round"], handler, client, *before.get(client, (None, 0))), line))
        before[client] = (line["round"], line["value_bytes_up"])
    return found


@pytest.mark.parametrize("name", CASES)
def test_bytes_follow_the_cost_a_method_states(name, reference):
    for exchange, line in counted(reference(name)):
        cost = COSTS[name](exchange)
        for way, values, bits in (("up", cost.up, cost.up_bits), ("down", cost.down, cost.down_bits)):
            for column, allowed in ((f"value_bytes_{way}", values), (f"mask_bits_{way}", bits)):
                assert line[column] in ({allowed} if isinstance(allowed, int) else allowed), (exchange, column)
            if values == bits == 0:
                assert line[f"bytes_{way}"] == 0, (exchange, way)


@pytest.mark.parametrize(("name", "sent"), [("fedkgf", 72 + 72 + 780), ("fedkgf-ablated", 2 * 108 + 3 * (72 + 780))])
def test_a_round_of_fed_kgf_sends_every_group_as_often_as_it_has_owners(name, sent, reference):
    rounds = [(exchange.round, line["value_bytes_up"]) for exchange, line in counted(reference(name))]
    assert {sum(up for t, up in rounds if t == this) for this in range(1, ROUNDS + 1)} == {sent}


def test_every_case_has_its_cost():
    assert COSTS.keys() == CASES.keys()
