"""The folders of nodes on other hosts, written and written again, without any process."""

from __future__ import annotations

import configparser
import re
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from packaging.requirements import Requirement

from fewbytes.base.errors import UserError
from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.hosts import settled
from fewbytes.experiments.places import Nodes, Place, places, remembered
from fewbytes.experiments.settings import make_experiment
from fewbytes.flower.node_file import NodeFile
from fewbytes.flower.own_certificates import check_certificates

SMALL = {"method": "fedavg", "dataset": "digits", "clients": 2, "rounds": 1, "engine": "flower-deployment"}


def prepared(folder: Path, resume: bool = False, address: str = "server.example:9092", listen: str = "") -> Path:
    """The folder of a deployment to two hosts."""
    experiment = make_experiment(SMALL)
    nodes = Nodes(places(experiment, "north,south"), address, listen=listen or None)
    deployment = Deployment(settled(experiment, True), folder / "run", nodes, resume)
    deployment.prepare()
    return deployment.folder


def test_private_keys_that_hosts_have_may_be_deleted_here(tmp_path):
    folder = prepared(tmp_path)
    copies = [folder / "keys" / "north", folder / "nodes" / "north" / "keys" / "north"]
    before = (folder / "keys" / "north.pub").read_bytes()
    assert copies[0].read_bytes() == copies[1].read_bytes()
    for path in copies:
        path.unlink()
    assert prepared(tmp_path, resume=True) == folder
    assert not any(path.exists() for path in copies)
    assert (folder / "keys" / "north.pub").read_bytes() == before
    assert (folder / "nodes" / "south" / "keys" / "south").exists()


def test_a_server_that_moves_is_resumed_at_its_new_address(tmp_path):
    before = prepared(tmp_path)
    ca = (before / "certificates" / "ca.crt").read_bytes()
    folder = prepared(tmp_path, resume=True, address="[2001:db8::7]:9443", listen="10.0.0.5:9092")
    assert NodeFile.read(folder / "nodes" / "north" / "node.toml").superlink == "[2001:db8::7]:9443"
    assert (folder / "nodes" / "north" / "certificates" / "ca.crt").read_bytes() == ca
    check_certificates(folder / "certificates", ["server.example", "2001:db8::7"])
    none = dict.fromkeys(("hosts", "address", "listen", "node", "federation"))
    known = {"hosts": "north,south", "address": "[2001:db8::7]:9443", "listen": "10.0.0.5:9092", "node": "resident"}
    known["federation"] = None
    assert remembered(folder.parent, none) == known
    assert remembered(folder.parent, none | {"address": "new:1"}) == known | {"address": "new:1"}
    with pytest.raises(UserError, match="deployed with --hosts north,south, not north"):
        remembered(folder.parent, none | {"hosts": "north"})


def test_where_a_server_listens():
    there = [Place("north", False)]
    assert Nodes(there, "server.example:9092").bind.endswith(":9092")
    assert Nodes(there, "server.example:443", listen="10.0.0.5:9092").bind == "10.0.0.5:9092"
    for address in ("server.example", "2001:db8::7:9092", "https://server:1", "server:70000"):
        with pytest.raises(UserError, match=r"--address is .*: expected host:port"):
            Nodes(there, address)
    with pytest.raises(UserError, match="--listen is '9092': expected host:port"):
        Nodes(there, "server.example:443", listen="9092")
    with pytest.raises(UserError, match="--listen needs --hosts"):
        Nodes([Place("north", True)], listen="10.0.0.5:9092")


def test_a_container_and_a_service_run_as_no_root_with_flower(tmp_path):
    folder = prepared(tmp_path) / "nodes" / "north"
    container, unit = (folder / "Dockerfile").read_text(), (folder / "fewbytes-north.service").read_text()
    installed = re.search(r'pip install [^"\n]*"([^"]+)"', container)[1]
    wanted = Requirement(installed)
    assert wanted.name == "fewbytes"
    assert wanted.extras == {"flower", "monitor"}
    assert wanted.specifier.contains(version("fewbytes"), prereleases=True)
    lines = container.splitlines()
    assert lines.index("USER 10001") < lines.index('CMD ["sh", "start.sh"]')
    service = configparser.ConfigParser(comment_prefixes="#")
    service.optionxform = str
    service.read_string(unit)
    assert service["Service"]["User"] == "fewbytes"
    assert service["Service"]["ReadWritePaths"] == service["Service"]["WorkingDirectory"] == "/opt/fewbytes/north"


def test_printed_commands_hold_in_folders_with_spaces_and_quotes(tmp_path):
    nodes = Nodes(places(make_experiment(SMALL), None), "127.0.0.1:9092")
    deployment = Deployment(settled(make_experiment(SMALL), False), tmp_path / "my run's", nodes, False)
    deployment.prepare()
    printed = shlex.split(deployment.commands().partition("\n")[2])
    homes = [word.partition("=")[2] for word in printed if word.startswith("FLWR_HOME=")]
    assert homes == [str(deployment.folder / part) for part in ("flower-home", "homes/client-0", "homes/client-1")]
