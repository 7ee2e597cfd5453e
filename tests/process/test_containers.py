"""The Dockerfile and the Compose file of examples/09_containers: their steps, taken in a fresh root."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed: compose.yaml cannot be read")
pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

import yaml
from fresh_root import FreshRoot, permitted, steps
from runs import PATIENCE, until
from started import started

from fewbytes.experiments.hosts import CONTAINER

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "09_containers"
COMPOSE = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())
SITES = ("north", "south", "west")


def test_the_example_has_the_dockerfile_that_nodes_get():
    assert (EXAMPLE / "Dockerfile").read_text() == CONTAINER.format(version=version("fewbytes"))


def test_an_image_has_no_build_tools_and_its_command_is_not_roots():
    there = steps((EXAMPLE / "Dockerfile").read_text())
    names = [name for name, _ in there]
    assert [about for name, about in there if name == "RUN" and re.search("apt|apk|gcc|make|git", about)] == []
    assert names.index("USER") < names.index("CMD")
    assert "HEALTHCHECK" in names
    assert all("--no-cache-dir" in about for _, about in there if "pip install" in about)


def test_every_service_is_confined_and_its_log_is_small():
    services = COMPOSE["services"]
    assert set(services) == {"server", *SITES}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["logging"]["options"] == {"max-size": "500k", "max-file": "2"}
        assert service["volumes"] == [f"{name}:/node"]
    assert services["server"]["ports"] == ["127.0.0.1:9100:9100"]
    assert set(COMPOSE["volumes"]) == set(services)


@pytest.mark.skipif(not permitted(), reason="this machine makes no roots: it needs root, unshare and overlayfs")
def test_the_steps_give_a_server_and_three_sites_that_train_two_rounds(tmp_path):
    wheels, root = tmp_path / "wheels", tmp_path / "fresh"
    root.mkdir()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), str(ROOT)]
    subprocess.run(command, check=True)
    with ExitStack() as stack:
        image = FreshRoot(root, wheels)
        stack.callback(image.close)
        image.build((EXAMPLE / "Dockerfile").read_text())
        where = image.run(["python3", "-c", "import fewbytes, os; print(fewbytes.__file__, os.getuid(), os.getcwd())"])
        assert re.fullmatch(r"/usr/local/lib/python3\.\d+/site-packages/fewbytes/__init__.py 10001 /node\n", where)

        for name in COMPOSE["services"]:
            image.volume(name)
        # `docker compose run --rm -T --no-deps SERVICE COMMAND…`, as prepare.sh has it
        cases = [f'{name}) exec {shlex.join(image.inside([], volume=name))} "$@" ;;' for name in COMPOSE["services"]]
        shim = tmp_path / "bin" / "docker"
        shim.parent.mkdir()
        shim.write_text("#!/bin/sh\nservice=$6\nshift 6\ncase $service in\n" + "\n".join(cases) + "\nesac\n")
        shim.chmod(0o755)
        path = {**os.environ, "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", str(EXAMPLE / "prepare.sh")], env=path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

        ports = {name: 9100 + i for i, name in enumerate(COMPOSE["services"])}  # as all have one network here
        monitors = {name: {"FEWBYTES_MONITOR": f"127.0.0.1:{port}"} for name, port in ports.items()}
        for name in SITES:
            line = image.inside(image.command, monitors[name], name)
            started(line, tmp_path / f"{name}.log", stack)
        about = COMPOSE["services"]["server"]
        line = image.inside(about["command"], about["environment"], "server")
        server, said = started(line, tmp_path / "server.log", stack), tmp_path / "server.log"

        def healthy(name: str) -> bool:
            line = image.inside(["sh", "-c", image.health], monitors[name], name)
            return subprocess.run(line, capture_output=True, check=False).returncode == 0

        seen = set()
        while server.poll() is None:
            seen |= {name for name in COMPOSE["services"] if name not in seen and healthy(name)}
        assert server.wait(timeout=PATIENCE) == 0, said.read_text()
        assert seen == {"server", *SITES}
        rows = image.inside(["sh", "-c", "cat runs/*/rounds.jsonl"], volume="server")
        lines = subprocess.run(rows, capture_output=True, text=True, check=True).stdout.splitlines()
        rounds = [row for row in map(json.loads, lines) if row["phase"] == "round"]
        assert [(row["round"], row["cohort"]) for row in rounds] == [(1, 3), (2, 3)]
        assert until(lambda: not any(map(healthy, SITES)), PATIENCE)  # a node without its server is not
