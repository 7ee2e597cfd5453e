"""The laws on Flower's own processes: its Ray simulation, and its SuperLink and SuperNodes over TLS on loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cases import CASES, tiny_task
from commands import fewbytes
from flower_run import flower_run
from places import SITES, TEST, TRAIN, options
from runs import PATIENCE, ROUNDS, fingerprint, lines, tensorboard_scalars, until

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from fewbytes.flower.application import app_config
from fewbytes.flower.certificates import write_node_key
from fewbytes.flower.node_file import NodeFile
from fewbytes.flower.processes import Processes

TESTS = Path(__file__).parents[1]
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: no simulation")
FEWBYTES = [sys.executable, "-m", "fewbytes"]

APPS = """
import sys
sys.path.insert(0, {tests!r})
from cases import CASES, late_task, tiny_task
from flwr.serverapp import ServerApp
import fewbytes as fb
from fewbytes.flower.apps import client_app, serve
server, method = ServerApp(), CASES[{case!r}]
server = ServerApp()
@server.main()
def main(grid, context):
    names = [f"client-{{i}}" for i in range({clients})]
    serve(grid, method, {task}, rounds={rounds}, out={out!r}, names=names, evaluate_every={rounds})
client = client_app(method, lambda context: {task})
"""


def write_app(
    folder: Path, case: str, out: Path, task: str = "tiny_task(clients=2)", clients: int = 2, rounds: int = 2
) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(app_config("apps:server", "apps:client", {}))
    (folder / "LICENSE").write_text("Apache-2.0")
    text = APPS.format(tests=str(TESTS), case=case, out=str(out), task=task, rounds=rounds, clients=clients)
    (folder / "apps.py").write_text(text)
    return folder


@RAY
@pytest.mark.parametrize("name", ["fedpurin"])
def test_the_simulation_is_the_local_engine(name, uninterrupted, tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); import fewbytes as fb; from cases import CASES, tiny_task\n"
        f"fb.run(CASES[{name!r}], tiny_task(), rounds={ROUNDS}, out={str(tmp_path / 'run')!r}, "
        "engine='flower-simulation')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
    assert fingerprint(tmp_path / "run") == uninterrupted(name)


@RAY
def test_an_interrupted_simulation_is_resumed(tmp_path):
    options = ["fedavg", "--clients", "3", "--seed", "3", "--out", str(tmp_path), "--engine", "flower-simulation"]
    process = subprocess.Popen([*FEWBYTES, "run", *options, "--rounds", "20"], stderr=subprocess.PIPE, text=True)
    assert until(lambda: lines(tmp_path) > 2)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130, errors
    (folder,) = tmp_path.glob("[!.]*")
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    assert fewbytes("run", "--resume", folder).returncode == 0
    local = tmp_path / "local"
    options = [*options[:5], "--out", str(local), "--rounds", "20"]
    assert fewbytes("run", *options).returncode == 0
    assert fingerprint(folder) == fingerprint(next(local.iterdir()))


@pytest.mark.parametrize("kind", ["resident", "stock"])
def test_deploy_prepares_other_hosts(kind, tmp_path):
    options = ["fedavg", "--rounds", "2", "--hosts", "north,south", "--address", "server.example:9092", "--print"]
    options += [] if kind == "resident" else ["--node", kind]
    done = fewbytes("deploy", *options, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fewbytes.flower.guarded superlink" in done.stdout
    assert "--enable-supernode-auth" in done.stdout
    (folder,) = tmp_path.glob("[!.]*")
    node = folder / "deployment" / "nodes" / "south"
    assert (node / "keys" / "south").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in (node / "keys").iterdir()) == ["south"]
    assert (node / "certificates" / "ca.crt").exists()
    if kind == "stock":
        script = (node / "start.sh").read_text()
        assert "server.example:9092" in script
        assert "partition-id=1" in script
    else:
        about = NodeFile.read(node / "node.toml")
        assert about.superlink == "server.example:9092"
        assert about.config["partition-id"] == 1
        assert (node / "node.toml").stat().st_mode & 0o777 == 0o600
    for file in ("fewbytes-south.service", "Dockerfile"):
        assert "start.sh" in (node / file).read_text()
    subprocess.run(["sh", "-n", str(node / "start.sh")], check=True)
    assert not (folder / "config.toml").exists()  # nothing has run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "a,b", "--clients", "3"], "a name for each of the run's 3 clients, not 2"),
        (["--hosts", "a,b"], "need --address"),
        (["--hosts", "a,../b", "--address", "x:1"], "../b"),
        (["--hosts", "a,a", "--address", "x:1"], "names 'a' twice"),
        (["--address", "nowhere"], "'nowhere': expected host:port"),
        (["--min-replies", "2"], "--min-replies must be in"),
        (["--clients", "3", "--clusters", "4", "--print"], "set --clusters 3 or less"),
        (["--engine", "local", "--resume", "."], "not a run folder"),
    ],
)
def test_what_is_wrong_with_a_deployment_is_told_in_one_line(options, words, tmp_path):
    done = fewbytes("deploy", "fedavg", "--rounds", "1", *options, "--out", tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())  # what was refused leaves nothing behind


def test_a_deployment_is_not_resumed_as_a_local_run(tmp_path):
    folder = tmp_path / "run"
    fb.run(CASES["fedavg"], tiny_task(), rounds=1, out=folder)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text('dataset = "digits"\nengine = "flower-deployment"\n' + config)
    done = fewbytes("run", "--resume", folder)
    assert done.returncode == 2
    assert "fewbytes deploy" in done.stderr


@RAY
@pytest.mark.parametrize("component", ["apps", "own"])
def test_the_example_app_runs_as_its_readme_says(component, tmp_path):
    app = tmp_path / "app"
    shutil.copytree(TESTS.parent / "examples" / "03_flower", app)
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("fewbytes_example.apps", f"fewbytes_example.{component}"))
    out = tmp_path / "run"
    printed = flower_run(app, tmp_path, f'out="{out}" rounds=2', FEWBYTES_HOME=str(tmp_path / "fewbytes"))
    assert (out / "result.json").exists(), printed
    assert json.loads((out / "result.json").read_text())["status"] == "done"


def test_a_deployment_that_loses_its_server_says_so_and_is_left_alone_by_others(tmp_path):
    """While it runs, a second one in its folder is refused; the server's death ends it; it is resumed, and who watches
    it sees one run."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    long = ["--set", "epochs=100", "--set", "lr=0.001"]  # seconds a round
    options = ["fedavg", "--clients", "2", "--rounds", "3", *long]
    command = [*FEWBYTES, "deploy", *options, "--out", str(tmp_path / "there")]
    process = subprocess.Popen([*command, "--watch", "tensorboard"], stderr=subprocess.PIPE, text=True)
    assert until(lambda: lines(tmp_path / "there") >= 1)
    (folder,) = (tmp_path / "there").glob("[!.]*")
    second = fewbytes("deploy", "--resume", str(folder))
    assert second.returncode == 2
    assert "another deployment is running there" in second.stderr
    events = (folder / "deployment" / "events.jsonl").read_text().splitlines()
    (pid,) = {json.loads(line)["pid"] for line in events if '"began"' in line}
    os.kill(pid, signal.SIGKILL)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert re.search(r"the run's server died.*fewbytes deploy --resume", errors.replace("\n", " "))
    elsewhere = fewbytes("deploy", "--resume", str(folder), "--hosts", "a,b", "--address", "x.example:1")
    assert elsewhere.returncode == 2
    assert "resume it without changing that" in elsewhere.stderr
    resumed = fewbytes("deploy", "--resume", str(folder), "--watch", "tensorboard", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["status"] == "done"
    assert [t for t, _ in tensorboard_scalars(folder / "tensorboard")["accuracy/global"]] == [1, 2, 3]
    assert (folder / "report.html").exists()
    assert fewbytes("run", *options, "--out", tmp_path / "here").returncode == 0
    assert fingerprint(folder) == fingerprint(next((tmp_path / "here").iterdir()))


def test_a_deployment_that_was_killed_is_gone_on_with_at_once(tmp_path):
    """Its server outlives it by some seconds, and holds the run."""
    command = [*FEWBYTES, "deploy", "fedavg", "--clients", "2", "--rounds", "3", "--set", "epochs=100"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.DEVNULL)
    assert until(lambda: lines(tmp_path) >= 1)
    process.kill()
    process.wait()
    (folder,) = tmp_path.glob("[!.]*")
    resumed = fewbytes("deploy", "--resume", str(folder), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert (json.loads(resumed.stdout)["status"], json.loads(resumed.stdout)["rounds"]) == ("done", 3)


@pytest.mark.parametrize("who", ["deploy", "server"])
def test_a_deployment_that_is_asked_to_end_leaves_a_result_and_no_uploads(who, tmp_path):
    command = [*FEWBYTES, "deploy", "fedavg", "--clients", "2", "--rounds", "50", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert until(lambda: lines(tmp_path) >= 1)
    (folder,) = tmp_path.glob("[!.]*")
    deployment = folder / "deployment"
    events = (deployment / "events.jsonl").read_text().splitlines()
    (pid,) = {json.loads(line)["pid"] for line in events if '"began"' in line}
    os.kill(pid if who == "server" else process.pid, signal.SIGTERM)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 130, errors
    assert "resume with: fewbytes deploy --resume" in errors.replace("\n", " ")
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    assert deployment.stat().st_mode & 0o777 == 0o700
    assert not [path for path in deployment.rglob("*") if path.is_file() and b"fewbytes.frame" in path.read_bytes()]


def test_damaged_certificates_and_keys_are_named(tmp_path):
    options = ["fedavg", "--clients", "2", "--rounds", "1"]
    assert fewbytes("deploy", *options, "--print", "--out", str(tmp_path)).returncode == 0
    (folder,) = tmp_path.glob("[!.]*")
    with Processes(folder / "deployment", "127.0.0.1:0") as flower:
        (folder / "deployment" / "certificates" / "ca.crt").write_text("broken")
        with pytest.raises(fb.UserError, match=r"ca.crt .*certificates"):
            flower.start_superlink()
    (folder / "deployment" / "keys" / "client-0").write_text("broken")
    with pytest.raises(fb.UserError, match=r"client-0: .*private key"):
        write_node_key(folder / "deployment" / "keys", "client-0")


def test_the_printed_commands_work_as_they_are(tmp_path):
    done = fewbytes("deploy", "fedavg", "--clients", "2", "--rounds", "1", "--print", "--out", str(tmp_path))
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = (
        f"{lines[0]}\n{lines[1]} &\nlink=$!\nsleep 12\n{lines[2]}\nstatus=$?\nkill $link\nwait $link\nexit $status\n"
    )
    ran = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "registered successfully" in ran.stdout + ran.stderr


def test_every_image_of_three_nodes_own_folders_is_used(places):
    done = fewbytes("deploy", "fedavg", *options(places), "--rounds", "1", "--json", "--out", places / "runs")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["clients"], result["left_out"]) == ("done", 3, 0)
    (run,) = (places / "runs").glob("[!.]*")
    assert json.loads((run / "partition.json").read_text()) == {
        "classes": ["benign", "malignant"], "train": TRAIN, "test": TEST, "names": list(SITES),
    }  # fmt: skip
    assert sum(map(sum, TRAIN + TEST)) == 120
    for counts in (TRAIN, TEST):
        assert json.dumps(counts, separators=(",", ":")) in (run / "report.html").read_text()
    assert fewbytes("run", "fedavg", *options(places), "--rounds", "1", "--out", places / "here").returncode == 0
    made, here = fingerprint(run), fingerprint(next((places / "here").iterdir()))
    read = here["result"]["notes"]
    assert made["result"].pop("notes") == read[:1]  # of nodes' own folders their own logs say what was read
    assert here["result"].pop("notes") == read
    assert [name in line for line in read[1:] for name in ("east", "north", "south")].count(True) == 3
    assert made == here


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """A SuperLink and two SuperNodes over TLS, with node authentication; used last, as idle they keep a core busy."""
    folder = tmp_path_factory.mktemp("deployment")
    with Processes(folder, "127.0.0.1:0") as flower:
        flower.start_superlink()
        flower.register(["client-0", "client-1"])
        for i in (0, 1):
            flower.start_node(f"client-{i}", {"partition-id": i, "folder": str(folder / "runs")})
        yield flower


def test_a_deployment_is_the_local_engine(deployment, tmp_path):
    name = "fusefl"
    out = deployment.folder / "runs" / name
    run = deployment.submit(write_app(tmp_path / "app", name, out))
    assert until(lambda: deployment.run_status(run)[0].startswith("finished"), every=2), deployment.run_status(run)
    assert deployment.run_status(run) == ("finished:completed", "")
    fb.run(CASES[name], tiny_task(clients=2), rounds=2, out=tmp_path / "local", evaluate_every=2)
    assert fingerprint(out) == fingerprint(tmp_path / "local")


def test_a_newcomer_that_connects_to_a_live_run_is_served_between_rounds(deployment, tmp_path):
    """GENE-FL: it describes its data, gets the nearest cluster's learnGene, and trains from then on."""
    out = deployment.folder / "runs" / "live"
    deployment.register(["client-2"])
    run = deployment.submit(write_app(tmp_path / "app", "genefl", out, "late_task()", clients=3, rounds=4))
    deadline, connected = time.monotonic() + PATIENCE, False
    while not deployment.run_status(run)[0].startswith("finished"):
        assert time.monotonic() < deadline, deployment.run_status(run)
        if not connected and (out / "rounds.jsonl").exists() and len((out / "rounds.jsonl").read_text().splitlines()):
            deployment.start_node("client-2", {"partition-id": 2, "folder": str(deployment.folder / "runs")})
            connected = True
        time.sleep(1)
    assert deployment.run_status(run) == ("finished:completed", "")
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    (join,) = [row for row in rows if row["phase"] == "join"]
    assert join["client"] == 2
    assert 1 < join["round"] <= 4
    assert join["uplink_bytes"] > 0 < join["downlink_bytes"]
    assert [row["round"] for row in rows if row["phase"] == "round"] == [1, 2, 3, 4]
    ledger = pq.read_table(out / "ledger.parquet").to_pylist()
    assert {"describe", "begin"} <= {row["handler"] for row in ledger if row["client"] == 2}
