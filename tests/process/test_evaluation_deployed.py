"""Models tested at real nodes of a federation: the figures of `fewbytes evaluate` here, as far as node.toml allows."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest
from commands import fewbytes
from runs import PATIENCE, until
from started import started
from surveyed import patients

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from fewbytes.flower.children import free_port

RULES = {
    "north": 'tell = "figures"',
    "south": 'tell = "sizes"\nevaluate-only = true',
    "west": 'tell = "nothing"',
    "shut": 'tell = "figures"\nmethods = "fedavg"',
    "east": 'tell = "labels"\nmin-count = 12',
}
"""By site: its lines in node.toml."""
SECRET = 4242.0
"""A value that only west has."""


def deployed(folder: Path, stack: ExitStack, *arguments: str) -> None:
    log = folder / "server.log"
    server = started([sys.executable, "-m", "fewbytes", *arguments], log, stack, cwd=folder)
    assert until(lambda: server.poll() is not None, PATIENCE)
    assert server.returncode == 0, log.read_text()


def test_sites_test_a_run_as_it_is_tested_here(tmp_path):
    (tmp_path / "sites").mkdir()
    for number, name in enumerate(RULES):
        frame = patients(120, 3 * number - 4, number)
        frame.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    patients(100, 0, 30).to_csv(tmp_path / "server.csv", index=False)
    order = sorted(RULES)  # of the folder
    made = fewbytes(
        *("run", "fedavg", "--partition", "local", "--dataset", "server.csv", "--client-data", "sites"),
        *("--target", "ill", "--leave-out", "sex", "--rounds", "2", "--set", "lr=0.1", "--workers", "1"),
        *("--metrics", "auc,accuracy,sensitivity@specificity=0.9", "--positive", "yes", "--out", "runs"),
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    (run,) = (tmp_path / "runs").iterdir()
    evaluated = fewbytes("evaluate", run, "--alone", "--by", "sex", cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    here = json.loads((run / "evaluation.json").read_text())
    fewbytes("federation", "init", "--address", f"127.0.0.1:{free_port('127.0.0.1')}", cwd=tmp_path)
    for name in order:  # members are numbered in the order in which they join
        invitation = fewbytes("federation", "invite", name, cwd=tmp_path).stdout
        request = fewbytes("node", "init", name, "--invitation", invitation.strip(), cwd=tmp_path).stdout
        assert fewbytes("federation", "join", request.strip(), cwd=tmp_path).returncode == 0
        file, data = tmp_path / name / "node.toml", tmp_path / "sites" / f"{name}.csv"
        file.write_text(file.read_text().replace('tell = "sizes"\n', "") + f'{RULES[name]}\nclient-data = "{data}"\n')
    secret = pd.read_csv(tmp_path / "sites" / "west.csv")
    secret["mass"] = secret["mass"].where(secret.index != 3, SECRET)
    secret.to_csv(tmp_path / "sites" / "west.csv", index=False)
    node_log = tmp_path / "node.log"
    with ExitStack() as stack:
        files = [str(tmp_path / name / "node.toml") for name in order]
        started([sys.executable, "-m", "fewbytes", "node", *files], node_log, stack)
        where = ["--federation", "federation", "--min-replies", "0.1"]
        deployed(tmp_path, stack, "evaluate", str(run), "--alone", "--by", "sex", "--out", "asked", *where)
    log = (tmp_path / "server.log").read_text()
    found = json.loads((run / "evaluation.json").read_text())
    gains = {(g["models"], g["site"]): g["gain"] for g in here["gains"] if g["site"] is not None}
    at_sites = {(g["models"], g["site"]): g["gain"] for g in found["gains"] if g["site"] is not None}
    assert len(at_sites) == 3
    assert at_sites == {key: gains[key] for key in at_sites}
    (mean,) = (g["gain"] for g in found["gains"] if g["site"] is None)
    assert mean["low"] <= mean["value"] <= mean["high"]
    assert mean["value"] == pytest.approx(sum(g["value"] for g in at_sites.values()) / 3)
    assert "federating helps" in log.lower() or "federating hurts" in log.lower()
    assert [site["name"] for site in found["sites"]] == ["east", "north", "south"]
    both = {(cell["models"], cell["site"]): cell for cell in here["cells"] if cell["of"] in (None, cell["site"])}
    assert {cell["models"] for cell in found["cells"]} == {"shared model", "training alone"}
    for cell in found["cells"]:
        assert cell["scores"] == both[cell["models"], cell["site"]]["scores"]  # values and intervals, to the bit
    shared = "shared model"
    at = {site: cell for (models, site), cell in both.items() if models == shared}
    cells = {cell["site"]: cell for cell in found["cells"] if cell["models"] == shared}
    assert cells["north"]["confusion"] == at["north"]["confusion"]
    assert cells["south"]["confusion"] is None
    assert "calibration" not in cells["south"]
    assert all(not sum(row) or sum(row) >= 12 for row in cells["east"]["confusion"])
    assert all(count >= 10 for _, _, count in cells["north"]["calibration"])
    assert [text.partition(":")[0] for text in found["unreported"]] == [
        "shut has no figures",
        "west reports no figures",
        "No subgroups by 'sex' of east, south",
    ]
    groups = {(g["models"], g["group"]): g["score"] for g in here["groups"] if g["site"] == "north"}
    assert {g["site"] for g in found["groups"]} == {"north"}  # the others tell less
    assert {(g["models"], g["group"]): g["score"] for g in found["groups"]} == groups
    assert "evaluation is not among its methods (fedavg)" in found["unreported"][0]
    for text in [*found["unreported"], "sensitivity@specificity=0.9 at"]:
        assert text[:40] in log
    assert "Traceback" not in log + node_log.read_text()
    (asked,) = (tmp_path / "asked").iterdir()
    assert (asked / "evaluation.html").is_file()
    left = (asked / "rounds.jsonl").read_text() + (asked / "evaluation.json").read_text()
    assert str(SECRET) not in left
    assert "west" not in {cell["site"] for cell in found["cells"]}
    record = tmp_path / "south" / "runs" / ".egress" / "node" / "egress.jsonl"
    assert "test" in {json.loads(line).get("handler") for line in record.read_text().splitlines()}
