"""A survey over real nodes of a federation: the same figures, as far as each site's node.toml allows."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import pandas as pd
import pytest
from commands import fewbytes
from runs import PATIENCE, until
from started import started
from surveyed import tables

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from fewbytes.flower.children import free_port

RULES = {
    "north": 'tell = "figures"\nsurvey-salt = "agreed by telephone"',
    "south": 'tell = "figures"\nmin-count = 25\nsurvey-salt = "agreed by telephone"',
    "one": 'tell = "nothing"',
    "two": 'tell = "nothing"',
    "three": 'tell = "figures"\nrequire = "secure-aggregation"',
    "shut": 'tell = "figures"\nmethods = "fedavg"',
}
"""By site: its lines in node.toml."""


def test_a_survey_of_a_federation_obeys_each_sites_node_file(tmp_path):
    fewbytes("federation", "init", "--address", f"127.0.0.1:{free_port('127.0.0.1')}", cwd=tmp_path)
    frames = tables()
    frames |= {name: frames["north"][i::4].assign(age=lambda f: f.age + 1) for i, name in enumerate([*RULES][2:])}
    frames["south"].iloc[:15] = frames["north"].iloc[:15]
    frames["south"].iloc[20:40, frames["south"].columns.get_loc("smoker")] = "rarely"
    for name, rules in RULES.items():
        invitation = fewbytes("federation", "invite", name, cwd=tmp_path).stdout
        request = fewbytes("node", "init", name, "--invitation", invitation.strip(), cwd=tmp_path).stdout
        assert fewbytes("federation", "join", request.strip(), cwd=tmp_path).returncode == 0
        frames[name].to_csv(tmp_path / name / "patients.csv", index=False)
        file = tmp_path / name / "node.toml"
        file.write_text(file.read_text().replace('tell = "sizes"\n', "") + f'{rules}\nclient-data = "patients.csv"\n')
    server_log, node_log = tmp_path / "server.log", tmp_path / "node.log"
    with ExitStack() as stack:
        files = [str(tmp_path / name / "node.toml") for name in RULES]
        started([sys.executable, "-m", "fewbytes", "node", *files], node_log, stack)
        command = [sys.executable, "-m", "fewbytes", "survey", "--federation", "federation", "--target", "ill"]
        server = started([*command, "--duplicates", "--min-replies", "0.1"], server_log, stack, cwd=tmp_path)
        assert until(lambda: server.poll() is not None, PATIENCE)
    assert server.returncode == 0, server_log.read_text()
    (run,) = (tmp_path / "runs").iterdir()
    found = json.loads((run / "survey.json").read_text())
    sites = {site["name"]: site for site in found["sites"]}
    assert sites["north"]["columns"]["age"]["mean"] == pytest.approx(frames["north"]["age"].mean(), rel=1e-12)
    assert sites["south"]["columns"]["glucose"]["missing"] == frames["south"]["glucose"].isna().sum()
    assert "rarely" not in sites["south"]["columns"]["smoker"]["categories"]  # fewer than this site's 25
    assert all(sites[name]["samples"] is None and not sites[name]["columns"] for name in ("one", "two", "three"))
    assert found["absent"] == ["shut"]
    assert "survey is not among its methods (fedavg)" in node_log.read_text()
    (group,) = found["hidden"]
    three = pd.concat(frames[name] for name in ("one", "two", "three"))
    assert (group["sites"], group["samples"]) == (["one", "two", "three"], len(three))
    assert group["columns"]["age"]["mean"] == pytest.approx(three["age"].mean(), rel=1e-6)
    (both,) = found["common"]
    assert both["sites"] == ["north", "south"]
    assert 15 <= both["samples"] <= 25  # and some rows without glucose, by chance
    assert found["uplink_bytes"] == sum(site["uplink_bytes"] for site in found["sites"]) > 0
    assert (run / "survey.html").is_file()
    assert "Traceback" not in server_log.read_text() + node_log.read_text()
    record = tmp_path / "one" / "runs" / ".egress" / "node" / "egress.jsonl"
    left = [json.loads(line) for line in record.read_text().splitlines()]
    assert "introduce" in {line.get("handler") for line in left}
