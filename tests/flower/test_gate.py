"""A site's policy at its node: every rule tried by a server that asks for more, and the record of what left."""

from __future__ import annotations

import io
import json
import re
import shutil

import pytest
from cases import CASES
from test_allowance import PROMISE, task

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from commands import fewbytes
from flower_grid import MemoryGrid, left_out, rounds_of, run
from modules import needs

from fewbytes.base.chain import verify
from fewbytes.core.site_policy import KEYS
from fewbytes.experiments.app import _of_a_node, read_run_config
from fewbytes.flower import gate
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

METHOD = CASES["fedavg"]
SITE = 1  # the client whose site has a policy


class OneSite(MemoryGrid):
    """A grid in which one site has `rules`, and the `others` another configuration."""

    def __init__(self, app, rules, others):
        super().__init__(app, 4)
        self.rules, self.others = rules, others

    def answer(self, message):
        self.config = self.rules if message.metadata.dst_node_id == 1000 + SITE else self.others
        return super().answer(message)


def grid_of(folder, rules, dp=None):
    made = METHOD.promising(METHOD.adapted(task()), dp, 4)
    spend = {} if dp is None else {"privacy-in-all": "any"}
    return OneSite(client_app(METHOD, made, folder / "nodes"), rules | spend, spend)


def go(folder, rules, name="run", policy=None, **settings):
    grid = grid_of(folder, rules, settings.get("dp"))
    result, _ = run("fedavg", folder / name, task=task(), grid=grid, policy=policy, **settings)
    return result


def record(folder, site=SITE):
    return folder / "nodes" / gate.FOLDER / str(site)


def lines(folder, site=SITE):
    if not (record(folder, site) / "egress.jsonl").exists():
        return []
    found, fault = verify(record(folder, site))
    assert fault is None
    return [line for line in found if "rules" not in line]


def answered(folder, site=SITE):
    return [line["round"] for line in lines(folder, site) if line["replies"]]


REFUSED = {  # by the rule: what the server is told
    "methods": ("fedprox, scaffold", "fedavg is not among its methods"),
    "min-samples": (21, "fewer than 21 training samples"),
    "max-bytes-in-all": (0, r"all its 0 bytes have left \(max-bytes-in-all\)"),
    "max-rounds": (0, "all its 0 rounds are answered"),
    "ask": (True, "a person there has not approved this run"),
    "hours": ("20-6", "it works from .* local time"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_run_that_asks_for_more_begins_without_the_site_and_ends_with_the_others(key, tmp_path, monkeypatch):
    value, why = REFUSED[key]
    monkeypatch.setattr("fewbytes.flower.node.minute", lambda: 12 * 60)
    result = go(tmp_path, {key: value})
    assert result.summary["status"] == "done"
    rounds = rounds_of(tmp_path / "run")
    for row in rounds:
        [left] = row["left_out"]
        assert left["client"] == SITE
        assert re.search(f"its site declines: .*{why}", left["why"])
    assert lines(tmp_path) == []
    assert answered(tmp_path, 0) == [1, 2, 3, 4]


def test_a_run_that_too_many_sites_decline_ends_in_a_sentence_with_the_reason(tmp_path):
    grid = MemoryGrid(client_app(METHOD, task(), tmp_path / "nodes"), 4)
    grid.config = {"methods": "fedprox"}
    with pytest.raises(fb.UserError, match=r"client 0 cannot take part: its site declines: fedavg is not among"):
        run("fedavg", tmp_path / "run", task=task(), grid=grid)


def test_rounds_end_at_the_limit_of_all_runs_together_also_after_a_restart(tmp_path):
    go(tmp_path, {"max-rounds": 5}, "first", rounds=3)
    gate_of_a_new_process()
    go(tmp_path, {"max-rounds": 5}, "second", rounds=3)
    assert answered(tmp_path) == [1, 2, 3, 1, 2]
    assert answered(tmp_path, 0) == [1, 2, 3, 1, 2, 3]
    assert [(t, i) for t, i, _ in left_out(tmp_path / "second")] == [(3, SITE)]


def gate_of_a_new_process():
    from fewbytes.flower import apps

    apps._gates.clear()
    apps._nodes.clear()


def test_bytes_end_at_the_limit_and_nothing_that_is_over_it_leaves(tmp_path):
    go(tmp_path, {}, "measured", rounds=3)
    each = [line["bytes"] for line in lines(tmp_path)]
    limit = sum(each) + sum(each[:3])
    gate_of_a_new_process()
    go(tmp_path, {"max-bytes-in-all": limit}, "limited", rounds=3)
    assert sum(line["bytes"] for line in lines(tmp_path)) <= limit
    assert answered(tmp_path)[:5] == [1, 2, 3, 1, 2]
    assert (3, SITE, "declined") in left_out(tmp_path / "limited")


def test_a_reply_of_too_many_bytes_is_kept_back_and_the_site_is_asked_twice_at_most(tmp_path):
    go(tmp_path, {"max-bytes-a-round": 150}, rounds=5)
    assert answered(tmp_path) == []
    outcomes = [(t, outcome) for t, i, outcome in left_out(tmp_path / "run") if i == SITE]
    assert outcomes == [(1, "declined"), (2, "declined"), (3, "excluded"), (4, "excluded"), (5, "excluded")]


def test_a_site_that_only_evaluates_sends_no_reply(tmp_path):
    go(tmp_path, {"evaluate-only": True}, rounds=4)
    assert [line["handler"] for line in lines(tmp_path)][:1] == [":data"]
    assert answered(tmp_path) == []


def test_a_site_whose_hours_begin_takes_part_from_then_on(tmp_path, monkeypatch):
    grid = grid_of(tmp_path, {"hours": "20-6"})
    monkeypatch.setattr("fewbytes.flower.node.minute", lambda: 60 * (12 if trained(grid) < 6 else 21))
    run("fedavg", tmp_path / "run", task=task(), grid=grid, rounds=4)
    assert answered(tmp_path) == [3, 4]


def trained(grid):
    return sum(message.metadata.message_type == "train.handler" for message in grid.asked)


def test_a_site_whose_hours_end_leaves_and_comes_back(tmp_path, monkeypatch):
    """Twice, so that being out once does not count against it later. The clock is the record of the other site, which
    answers after it."""
    grid = grid_of(tmp_path, {"hours": "20-6"})
    noon = {3, 6, 7}  # rounds that the other site has answered
    monkeypatch.setattr("fewbytes.flower.node.minute", lambda: 60 * (12 if len(answered(tmp_path, 0)) in noon else 21))
    run("fedavg", tmp_path / "run", task=task(), grid=grid, rounds=9)
    assert answered(tmp_path) == [1, 2, 3, 5, 6, 9]


@pytest.mark.parametrize("needed", ["secure-aggregation", "dp-samples<=8"])
def test_a_run_without_the_protection_that_a_site_requires_begins_without_it(needed, tmp_path):
    go(tmp_path, {"require": needed})
    assert lines(tmp_path) == []
    assert "require" in rounds_of(tmp_path / "run")[0]["left_out"][0]["why"]


def test_a_run_with_the_privacy_that_a_site_requires_has_the_site_and_the_record_says_what_is_spent(tmp_path):
    needs("dp_accounting")
    go(tmp_path, {"require": "dp-samples<=8"}, dp=PROMISE)
    assert answered(tmp_path) == [1, 2, 3, 4]
    spent = [line["epsilon"] for line in lines(tmp_path) if line["replies"]]
    assert spent == sorted(spent)
    assert 0 < spent[-1] <= 8.001
    grid = grid_of(tmp_path, {"require": "dp-samples<=7"}, PROMISE)
    run("fedavg", tmp_path / "more", task=task(), grid=grid, dp=PROMISE)
    assert "epsilon 8 is above its 7" in rounds_of(tmp_path / "more")[0]["left_out"][0]["why"]


def test_noise_that_the_server_knows_and_a_large_delta_are_no_privacy(tmp_path):
    needs("dp_accounting")
    for name, dp in (("seeded", f"{PROMISE},noise=seeded"), ("delta", PROMISE.replace("1e-5", "0.2"))):
        go(tmp_path, {"require": "dp-samples<=8"}, name, dp=dp)
        assert "require" in rounds_of(tmp_path / name)[0]["left_out"][0]["why"]


def test_a_person_approves_a_run_by_its_file_and_no_other_run_with_it(tmp_path):
    go(tmp_path, {"ask": True}, "first")
    assert answered(tmp_path) == []
    [path] = record(tmp_path).glob("run-*.toml")
    assert "FedAvg(" in path.read_text()
    path.write_text(path.read_text().replace("approved = false", "approved = true"))
    shutil.rmtree(tmp_path / "nodes" / "first")
    go(tmp_path / "again", {"ask": True, "folder": str(tmp_path / "nodes")}, "first")
    assert answered(tmp_path) == [1, 2, 3, 4]
    go(tmp_path, {"ask": True}, "second")
    assert answered(tmp_path) == [1, 2, 3, 4]


def test_a_person_at_a_terminal_is_asked_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    go(tmp_path, {"ask": True})
    assert answered(tmp_path) == [1, 2, 3, 4]
    assert len(asked) == 1


@pytest.mark.parametrize("key", sorted(KEYS))
def test_no_server_can_send_a_rule(key):
    with pytest.raises(fb.UserError, match="which nodes refuse"):
        _of_a_node(read_run_config({key: "any"}))


def test_a_record_that_is_damaged_stops_all_that_would_leave(tmp_path):
    go(tmp_path, {}, "first")
    path = record(tmp_path) / "egress.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":9'))
    gate_of_a_new_process()
    go(tmp_path, {}, "second")
    assert "egress.jsonl, this node's record of what left, is damaged (line" in str(rounds_of(tmp_path / "second")[0])


def test_the_record_names_what_left_and_counts_its_bytes(tmp_path):
    result = go(tmp_path, {"max-rounds": 100})
    first = json.loads((record(tmp_path) / "egress.jsonl").read_text().splitlines()[0])
    assert first["rules"] == ["At most 100 rounds are answered in all runs together."]
    data, *trained = lines(tmp_path)
    assert (data["handler"], data["beside"]) == (":data", ["numbers of samples"])
    assert [line["fields"] for line in trained] == [{"theta": ["weight", "bias"], "samples": []}] * 4
    assert {"losses: train", "scores: personalised"} <= set(trained[0]["beside"])
    columns = result.ledger.columns()
    sent = columns["bytes_up"][columns["client"] == SITE].tolist()
    assert all(0 < line["bytes"] - up < 400 for line, up in zip(trained, sent, strict=True))  # measurements beside it
    assert trained[0]["run"] == "run"
    assert trained[0]["methods"] == ["fedavg"]


def test_a_reply_that_is_sent_again_is_recorded_again(tmp_path):
    """A line is what left, however often; it counts as no further round."""
    grid = grid_of(tmp_path, {"max-rounds": 1})
    run("fedavg", tmp_path / "run", task=task(), grid=grid, rounds=1)
    to_site = [each for each in grid.asked if each.metadata.dst_node_id == 1000 + SITE]
    message = next(each for each in to_site if each.metadata.message_type == "train.handler")
    gate_of_a_new_process()
    grid.answer(message)
    first, again = (line for line in lines(tmp_path) if line["replies"])
    assert (first["digest"], first["fields"]) == (again["digest"], again["fields"])


def test_a_reply_that_a_node_has_kept_can_be_inspected(tmp_path):
    go(tmp_path, {})
    done = fewbytes("inspect", tmp_path / "nodes" / "run" / "checkpoint" / "clients" / f"{SITE}.reply")
    assert done.returncode == 0, done.stderr
    assert "theta: weight, bias" in done.stdout
    assert "beside: scores: personalised, losses: train" in done.stdout
    assert re.search("payload +Trained *\n", done.stdout)
    assert "unknown" not in done.stdout
    assert re.search(r" theta +all entries of the model", done.stdout)
    (tmp_path / "0.reply").write_bytes(b"no reply")
    assert "0.reply is not a reply that a node has kept" in fewbytes("inspect", tmp_path / "0.reply").stderr


def test_secure_aggregation_is_what_a_site_requires_and_needs_no_permission_of_its_own(tmp_path):
    method = fb.SecureAggregation(METHOD)
    rules = {"methods": "fedavg", "require": "secure-aggregation"}
    grid = OneSite(client_app(method, task(), tmp_path / "nodes"), rules, {})
    settings = Settings(rounds=2, out=tmp_path / "run")
    serve_run(grid, Run.of(method, task(), settings, fb.Policy(retries=0)), exchange=Exchange(poll=0.001))
    assert {line["hidden"] for line in lines(tmp_path)} == {True}
    assert {1, 2} <= set(answered(tmp_path))
