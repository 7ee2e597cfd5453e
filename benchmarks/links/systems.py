"""The systems of the comparison: each deploys a server and sites on this machine, runs its rounds, and ends all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from measuring import Faults, Links, Measured, Terms
from proxied import deploy

from fewbytes.experiments.settings import make_experiment
from fewbytes.flower.certificates import write_certificates
from fewbytes.flower.children import free_port

HERE = Path(__file__).parent
DAY = 86400


def alone(place: Path, environment: dict[str, str], terms: Terms) -> None:
    """Each site trains alone, all at the same time: what a round takes at least."""
    words = [sys.executable, str(HERE / "task.py")]
    sites = [
        subprocess.Popen([*words, str(site), str(terms.rounds)], env=environment, cwd=place)
        for site in range(terms.sites)
    ]
    if sum(site.wait() for site in sites):
        raise RuntimeError("a site's training failed")


def flower(place: Path, environment: dict[str, str], terms: Terms, links: Links) -> None:
    """`flwr run` of flower_app over a SuperLink with TLS and a SuperNode for each site."""
    keys, home, port = place / "certificates", place / "home", str(free_port("127.0.0.1"))
    write_certificates(keys, [])
    home.mkdir()
    environment |= {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }  # fmt: skip
    (home / "config.toml").write_text(
        f'[superlink.tls]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{keys}/ca.crt"\n'
    )
    with links.to(int(port)) as ports, started(place, environment) as start:
        start(
            "flower-superlink", "--host", "127.0.0.1", "--port", port, "--ssl-ca-certfile", f"{keys}/ca.crt",
            "--ssl-certfile", f"{keys}/server.pem", "--ssl-keyfile", f"{keys}/server.key",
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        time.sleep(15)
        for site, through in enumerate(ports):
            start(
                "flower-supernode", "--root-certificates", f"{keys}/ca.crt", "--superlink", f"127.0.0.1:{through}",
                "--port", str(free_port("127.0.0.1")), "--node-config",
                f"partition-id={site} num-partitions={terms.sites}",
            )  # fmt: skip
        time.sleep(15)
        words = ["flwr", "run", str(HERE / "flower_app"), "tls", "--run-config", f"num-server-rounds={terms.rounds}"]
        printed = done(place, [*words, "--stream"], environment)
        shown = [line for line in printed.splitlines() if "failure" in line or "rror" in line]
        print("\n".join(shown), file=sys.stderr, flush=True)


def nvflare(place: Path, environment: dict[str, str], terms: Terms, links: Links) -> None:
    """A job of NVFlare's FedAvg in its proof-of-concept deployment, with mutual TLS."""
    workspace = place / "poc"
    environment |= {"NVFLARE_POC_WORKSPACE": str(workspace)}
    if environment["LINKS_QUANTISER"]:
        (place / "start").mkdir()
        (place / "start" / "sitecustomize.py").write_text("import on_cpu\n")
        paths = [str(place / "start"), str(HERE.parent / "nvflare"), environment["PYTHONPATH"]]
        environment |= {"PYTHONPATH": os.pathsep.join(paths)}
    done(place, ["nvflare", "poc", "prepare", "-n", str(terms.sites)], environment)
    (kits,) = workspace.glob("*/prod_00")
    with links.to(8002) as ports, started(place, environment) as start:
        start(str(kits / "server" / "startup" / "sub_start.sh"))
        time.sleep(20)
        for site, through in enumerate(ports, 1):
            file = kits / f"site-{site}" / "startup" / "fed_client.json"
            about = json.loads(file.read_text())
            about["servers"][0]["service"]["target"] = f"localhost:{through}"
            file.write_text(json.dumps(about))
            start(str(kits / f"site-{site}" / "startup" / "sub_start.sh"))
        time.sleep(20)
        job = [sys.executable, str(HERE / "nvflare_job.py"), str(kits / "admin@nvidia.com"), str(terms.rounds)]
        done(place, job, environment)


def deployed(terms: Terms) -> Measured:
    """`fewbytes deploy fedavg`, whose nodes stay loaded between rounds, by its own training loop: the same network,
    as much data and the same hyper-parameters. Each row's seconds are without scoring."""
    settings: dict[str, Any] = {
        "method": "fedavg", "dataset": "cifar10", "clients": terms.sites, "samples": f"{terms.images}/100",
        "partition": "iid", "model": "resnet18:stem=7x7", "rounds": terms.rounds, "save_models": False,
        "engine": "flower-deployment", "uplink_bits": 1.0, "downlink_bits": 1.0,
        "parameters": {"epochs": 1, "lr": 0.01, "batch": 32, "momentum": 0.9},
    }  # fmt: skip
    limit = Faults(terms.mbit * 1e6 / 8)
    with tempfile.TemporaryDirectory() as folder:
        seen = deploy(make_experiment(settings), Path(folder), limit, limit)
    start = [sum(each) for each in zip(*seen.taken[0][1], strict=True)]
    passed = [[sum(each) for each in zip(*taken, strict=True)] for _, taken in seen.taken[1:]]
    return Measured(
        list(itertools.accumulate(row["seconds"] - row["seconds_scoring"] for row in seen.rows)),
        [(up - start[0]) / 1e6 for up, _ in passed], [(down - start[1]) / 1e6 for _, down in passed],
        [row["scores"]["accuracy"]["global"] for row in seen.rows],
    )  # fmt: skip


def done(place: Path, words: Sequence[str], environment: dict[str, str]) -> str:
    """Run a command to its end; returns what it printed. Raises RuntimeError, with the end of that and of what the
    others printed, if it fails."""
    ended = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True, timeout=DAY)
    if ended.returncode:
        log = (place / "log").read_text()[-4000:] if (place / "log").exists() else ""
        raise RuntimeError(f"{' '.join(words)}\n{(ended.stdout + ended.stderr)[-4000:]}\n{log}")
    return ended.stdout + ended.stderr


@contextlib.contextmanager
def started(place: Path, environment: dict[str, str]) -> Iterator:
    """What starts a process; all of them, and what they have started, end with the context."""
    log = (place / "log").open("ab")
    mark = environment["LINKS_OUT"]

    def start(*words: str) -> None:
        subprocess.Popen(words, env=environment, cwd=place, stdout=log, stderr=log)

    try:
        yield start
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("LINKS_OUT") == mark:
                    process.kill()
