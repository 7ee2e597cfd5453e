"""Sites with policies in a real deployment: a server that asks for more is refused in one line at both ends, nothing
leaves, and the record proves it."""

from __future__ import annotations

import datetime
import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import fewbytes
from runs import PATIENCE, until
from started import started

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from fewbytes.flower.children import free_port

DECLINED = {  # by site: its rule, and why it declines before it trains
    "other": ('methods = "fedprox, scaffold"', r"fedavg is not among its methods \(fedprox, scaffold\)"),
    "small": ("min-samples = 1000", "fewer than 1000 training samples"),
    "hidden": ('require = "secure-aggregation"', "it takes part only under secure aggregation"),
    "private": ('require = "dp-samples<=8"', "it takes part only under differential privacy of samples"),
    "careful": ("ask = true", "a person there has not approved this run"),
    "asleep": ('hours = "{}"', "it works from .*, its local time"),
}
TOO_LARGE = r"its answer has [0-9,]+ bytes, more than 1,000 \(max-bytes-a-round\)"


def hours() -> str:
    """A span of local time that begins in two hours and ends in four."""
    times = [datetime.datetime.now() + datetime.timedelta(hours=n) for n in (2, 4)]
    return "-".join(f"{time.hour}:{time:%M}" for time in times)


def sites(place: Path) -> list[str]:
    """Make a federation's sites with these rules; their names."""
    fewbytes("federation", "init", "--address", f"127.0.0.1:{free_port('127.0.0.1')}", cwd=place)
    rules = {name: rule.format(hours()) for name, (rule, _) in DECLINED.items()}
    rules |= {"tight": 'max-bytes-a-round = "1kB"', "once": "max-rounds = 1", "open": ""}
    for name, rule in rules.items():
        invitation = fewbytes("federation", "invite", name, cwd=place).stdout
        request = fewbytes("node", "init", name, "--invitation", invitation.strip(), cwd=place).stdout
        assert fewbytes("federation", "join", request.strip(), cwd=place).returncode == 0
        with (place / name / "node.toml").open("a") as file:
            file.write(f"{rule}\n")
    return [*rules]


def record(place: Path, site: str) -> Path:
    """Where a site's node keeps its record of what left."""
    return place / site / "runs" / ".egress" / "node" / "egress.jsonl"


def answered(place: Path, site: str) -> list[int]:
    """The rounds in which replies left a site, by its record."""
    file = record(place, site)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["round"] for line in lines if line.get("replies")]


def matching(log: Path, words: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if re.search(words, line)]


def test_a_server_that_asks_for_more_gets_nothing_and_a_refusal_is_one_line_at_both_ends(tmp_path):
    names = sites(tmp_path)
    server_log, node_log = tmp_path / "server.log", tmp_path / "node.log"
    with ExitStack() as stack:
        files = [str(tmp_path / name / "node.toml") for name in names]
        started([sys.executable, "-m", "fewbytes", "node", *files], node_log, stack)
        settings = ["--dataset", "digits", "--samples", "40/10", "--set", "epochs=1", "--rounds", "3"]
        command = [sys.executable, "-m", "fewbytes", "deploy", "fedavg", *settings, "--federation", "federation"]
        server = started([*command, "--min-replies", "0.1"], server_log, stack, cwd=tmp_path)
        assert until(lambda: server.poll() is not None, PATIENCE)
    assert server.returncode == 0, server_log.read_text()

    for client, name in enumerate(names):
        here = matching(node_log, rf"client {client} declines: ")
        assert not matching(node_log, rf" {name}: .*declines")  # no second line
        if name in DECLINED:
            why = DECLINED[name][1]
            (line,) = matching(server_log, rf"^\S+ \S+ note: client {client} ")
            assert re.search(rf"cannot join: {name}: its site declines: .*{why}", line)
            assert all(re.search(rf"^\S+ \S+ round 0, :data: client {client} declines: .*{why}", line) for line in here)
            assert len(here) == 1, here  # though it is asked again before each round
            assert answered(tmp_path, name) == []
    tight, once = names.index("tight"), names.index("once")
    for client, first, why in ((tight, 1, TOO_LARGE), (once, 2, "all its 1 rounds are answered")):
        line = rf"^\S+ \S+ note: round {first}: client {client} declined: its site declines: {why}"
        assert len(matching(server_log, line)) == 1
        assert len(matching(node_log, rf"round {first}, train: client {client} declines: {why}")) == 1
    assert [answered(tmp_path, name) for name in ("tight", "once", "open")] == [[], [1], [1, 2, 3]]
    (run,) = (tmp_path / "runs").iterdir()
    rows = pq.read_table(run / "ledger.parquet").to_pylist()
    got = {(names[row["client"]], row["round"]) for row in rows if row["bytes_up"]}
    assert got == {("once", 1)} | {("open", t) for t in (1, 2, 3)}  # the server's books agree with the sites'
    assert "Traceback" not in server_log.read_text() + node_log.read_text()

    key = str(tmp_path / "open" / "keys" / "open.pub")
    for name in ("tight", "once", "open"):
        done = fewbytes("audit", name + "/runs", "--key", f"{name}/keys/{name}.pub", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    file = record(tmp_path, "open")
    whole = bytearray(file.read_bytes())
    place = whole.index(b'"bytes":', whole.index(b'"round":2')) + len(b'"bytes":')
    whole[place] ^= 1  # one bit of how many bytes left in round 2
    file.write_bytes(whole)
    done = fewbytes("audit", "open/runs", "--key", key, cwd=tmp_path)
    assert done.returncode == 1
    assert "line 4" in done.stdout + done.stderr
