"""A survey and an evaluation by files, from the command line: figures are those of one machine, to the bit."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE
from started import started
from surveyed import patients, write_tables

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

NAMES = ("north", "south", "west")
BY_FILE = ("--federation", "federation", "--mailbox", "box")


def done(*arguments: str | Path, cwd: Path) -> str:
    """What a command prints; it succeeds."""
    ended = fewbytes(*arguments, cwd=cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def consortium(tmp_path) -> Path:
    """Three members of a federation, whose tables are in `sites`, too, and a run on these."""
    frames = {name: patients(200, 3 * i - 3, i) for i, name in enumerate(NAMES)}
    write_tables(tmp_path / "sites", frames)
    patients(100, 0, 30).to_csv(tmp_path / "server.csv", index=False)
    done("federation", "init", "--address", "server.example:9092", cwd=tmp_path)
    for name in NAMES:
        (tmp_path / "invitation").write_text(done("federation", "invite", name, cwd=tmp_path))
        (tmp_path / "request").write_text(done("node", "init", name, "--invitation", "invitation", cwd=tmp_path))
        done("federation", "join", "request", cwd=tmp_path)
        file, data = tmp_path / name / "node.toml", tmp_path / "sites" / name
        file.write_text(file.read_text().replace('"sizes"', '"figures"') + f'client-data = "{data}"\n')
    done(
        *("run", "fedavg", "--partition", "local", "--dataset", "server.csv", "--client-data", "sites", "--target"),
        *("ill", "--leave-out", "sex", "--rounds", "1", "--set", "lr=0.1", "--out", "runs"), cwd=tmp_path,
    )  # fmt: skip
    return tmp_path


def carried(there: Path, *arguments: str, until=lambda: False) -> int:
    """The exit code of a server's command, while its sites work; it is interrupted when `until` says so."""
    with ExitStack() as stack:
        server = started([sys.executable, "-m", "fewbytes", *arguments], there / "server.log", stack, cwd=there)
        deadline = time.monotonic() + PATIENCE
        while server.poll() is None and time.monotonic() < deadline:
            for name in NAMES:
                box = there / "box" / name
                if list((box / "inbox").glob("*.order")):
                    done("node", "--once", box / "inbox", box / "outbox", cwd=there / name)
                if until():
                    server.terminate()
                    return server.wait(PATIENCE)
            time.sleep(0.2)
        assert server.poll() is not None
        return server.returncode


def test_a_survey_and_an_evaluation_that_is_resumed(consortium):
    log = consortium / "server.log"
    assert carried(consortium, "survey", *BY_FILE, "--target", "ill", "--out", "asked") == 0, log.read_text()
    here = json.loads(done("survey", "--client-data", "sites", "--target", "ill", "--json", cwd=consortium))
    (folder,) = consortium.glob("asked/*-survey")
    assert json.loads((folder / "survey.json").read_text())["pooled"] == here["pooled"]

    (run,) = consortium.glob("runs/*-fedavg")
    more = ("--without", "south", "--by", "age=50,70")
    done("evaluate", run, *more, cwd=consortium)
    here = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").unlink()

    def tests_models() -> bool:
        return bool([*consortium.glob("asked/*-evaluation/checkpoint")]) and bool([*consortium.glob("box/*/outbox/*")])

    assert carried(consortium, "evaluate", str(run), *more, *BY_FILE, "--out", "asked", until=tests_models) == 130
    (folder,) = consortium.glob("asked/*-evaluation")
    assert not (run / "evaluation.json").exists()
    assert carried(consortium, "deploy", "--resume", str(folder)) == 0, log.read_text()
    found = json.loads((run / "evaluation.json").read_text())
    cells = {(c["models"], c["site"]): (c["scores"], c["confusion"]) for c in here["cells"]}
    assert {(c["models"], c["site"]): c["scores"] for c in found["cells"]} == {k: v[0] for k, v in cells.items()}
    gains = {g["site"]: g["gain"] for g in here["gains"]}
    assert {g["site"]: g["gain"] for g in found["gains"] if g["site"]} == {k: v for k, v in gains.items() if k}
    groups = {(g["group"], g["site"]): g["score"] for g in here["groups"] if g["samples"] >= 10}
    assert found["groups"]
    assert all(g["score"] == groups[g["group"], g["site"]] for g in found["groups"])
    assert "Contribution of south" in log.read_text()
    assert "Traceback" not in log.read_text()
