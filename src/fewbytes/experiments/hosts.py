"""The folder for a node on another host, and what the server may name there."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.base.files import private_folder, replacing
from fewbytes.federation.texts import Invitation, Request
from fewbytes.flower.certificates import node_name, write_file, write_node_key
from fewbytes.flower.node_file import NodeFile
from fewbytes.flower.private import programs
from fewbytes.flower.processes import CA, Processes

if TYPE_CHECKING:  # these need torch: a site's key is made without
    from fewbytes.experiments.settings import Experiment

ENVIRONMENT, STOCK_ENVIRONMENT = (
    " ".join(f"{name}={value}" for name, value in variables.items())
    for variables in (programs.ENVIRONMENT, programs.SUPERNODE_ENVIRONMENT)
)
START = """#!/bin/sh
# The node {name}. Set FEWBYTES_DATA to the folder of its datasets. {about}
# Put your own modules that the run names, such as a model's, beside this file or on PYTHONPATH.
cd "$(dirname "$0")"
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
export {environment}
exec {command}
"""
OF_CONFIGURATION = """With a local partition:
# tell: what the server learns of the data before the run: sizes, labels (samples per class), or
# nothing; figures: in a survey, figures of every column, too. min-count: none of these is of fewer
# samples (default: 10). survey-salt: a secret common to the sites, to find near-duplicates.
# client-data: place of the data (a folder, a table, or package.module:function; default:
# as in the run). allow: comma-separated list of what the server may make this node use besides
# the datasets under FEWBYTES_DATA: modules of code, folders, names to download. It can run no other
# code here. privacy-in-all (epsilon=8,delta=1e-5): privacy budget of all runs together (default:
# what the first run promised). max-runs: maximum number of run folders. max-drift: maximum distance
# of a unit of a model's first layer from the agreed first model's (1: a right angle), for methods
# that send only models."""
RESIDENT_NODE = f"Its settings are in node.toml. {OF_CONFIGURATION}"
STOCK_NODE = f"Its settings are in the command below. {OF_CONFIGURATION}"
UNIT = """# The node {name} as a service that runs as the account fewbytes.
# Copy this folder to /opt/fewbytes/{name}, set FEWBYTES_DATA below, then
#   useradd --system --home-dir /opt/fewbytes --shell /usr/sbin/nologin fewbytes
#   chown -R fewbytes: /opt/fewbytes/{name}
#   systemctl enable --now /opt/fewbytes/{name}/fewbytes-{name}.service
[Unit]
Description=fewbytes node {name}
After=network-online.target
Wants=network-online.target

[Service]
User=fewbytes
WorkingDirectory=/opt/fewbytes/{name}
ExecStart=/bin/sh start.sh
# Environment=FEWBYTES_DATA=/srv/data
# Environment=PATH=/opt/fewbytes/venv/bin:/usr/bin:/bin
Restart=always
RestartSec=5
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths=/opt/fewbytes/{name}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""
CONTAINER = """\
# Nodes and servers as containers, without GPU, as the user 10001; keys stay out of the image. In a node's folder:
#   podman build --format docker -t fewbytes .
#   podman run -d --restart=always --userns=keep-id:uid=10001 -v /srv/data:/data:ro -v "$PWD":/node fewbytes
# With Docker, instead of --userns: chown -R 10001 . once, in this folder.
# If no index has the package, COPY a wheel, made by `pip wheel .` from its source: install "NAME.whl[flower,monitor]".
FROM docker.io/library/python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "fewbytes[flower,monitor]=={version}"
RUN useradd --uid 10001 --create-home fewbytes && install -d -o fewbytes -m 700 /node
ENV FEWBYTES_DATA=/data FEWBYTES_MONITOR=127.0.0.1:9100
USER 10001
WORKDIR /node
HEALTHCHECK --interval=30s --timeout=20s --start-period=2m CMD fewbytes status "http://$FEWBYTES_MONITOR"
CMD ["sh", "start.sh"]
"""
"""The Dockerfile of nodes' folders; examples/09_containers has the same."""


class Settled(msgspec.Struct, frozen=True):
    """The settings of a run as its deployment needs them, without torch: Flower's run config, and what it adds to the
    configuration of each node: what the server may name there, and for other hosts the limit of privacy spent."""

    run_config: dict[str, Any]
    allowed: dict[str, str]
    privacy: dict[str, str]


def settled(experiment: Experiment, remote: bool) -> Settled:
    """The settings of an experiment for a deployment; `remote`: whether its nodes are on other hosts."""
    experiment = experiment if remote else with_whole_paths(experiment)
    promise, privacy = experiment.run.dp, dict[str, str]()
    if promise is not None and promise.of == "samples":
        privacy = {"privacy-in-all": f"epsilon={promise.epsilon:g},delta={promise.delta:g}"}
    return Settled(experiment.run_config(), allowed(experiment, here=not remote), privacy)


def write_host(processes: Processes, name: str, config: Mapping[str, str | int], address: str) -> None:
    """Write the folder for a client's node on another host: the SuperLink's certificate, the node's settings, the
    scripts that start it and, unless it was removed here, the node's key.

    `config`: the client's number (partition-id) and what the server may name there. `address`: the SuperLink's.
    """
    folder = processes.folder / "nodes" / name
    private_folder(folder)
    for part in (f"keys/{name}", CA):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        if not (processes.folder / part).exists():
            continue
        with replacing(folder / part) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write((processes.folder / part).read_bytes())
    client = int(config["partition-id"])
    usual: dict[str, str | int] = {"partition-id": client, "folder": "runs", "tell": "sizes"}
    command = processes.node_command(name, {**usual, **config}, address, folder, port=9094 + client)
    if processes.resident:
        write_scripts(folder, name, command)
    else:
        write_scripts(folder, name, command, STOCK_NODE, STOCK_ENVIRONMENT)


def write_site(folder: Path, invitation: Invitation, name: str) -> Request:
    """Make a site's key in a new folder for its node, with its settings and the scripts that start it; the request that
    the site sends to the server. Raises UserError for an invitation of another name, and for a folder with a key."""
    if name != node_name(invitation.name):
        raise UserError(f"the invitation is for {invitation.name}, not {name}")
    key = folder / "keys" / name
    if key.exists():
        raise UserError(f"{key} is there already: a node that needs a new key gets a new folder (--folder)")
    private_folder(folder)
    write_node_key(key.parent, name)
    (folder / "certificates").mkdir(exist_ok=True)
    write_file(folder / CA, invitation.ca.encode())
    about = NodeFile(invitation.superlink, CA, f"keys/{name}", {"member": name, "folder": "runs", "tell": "sizes"})
    write_file(folder / "node.toml", about.text().encode(), 0o600)
    write_scripts(folder, name, ["python3", "-m", "fewbytes", "node", "node.toml"])
    return Request.of(name, key)


def write_scripts(
    folder: Path, name: str, command: list[str], about: str = RESIDENT_NODE, environment: str = ENVIRONMENT
) -> None:
    """Write the scripts that start a node by a command in its folder: by hand, as a service, and as a container."""
    environment = f'{programs.HOME}="$PWD/flower-home" {environment}'
    for part, text in (
        ("start.sh", START.format(name=name, about=about, environment=environment, command=shlex.join(command))),
        (f"fewbytes-{name}.service", UNIT.format(name=name)),
        ("Dockerfile", CONTAINER.format(version=version("fewbytes"))),
    ):
        with replacing(folder / part) as file:
            file.write(text.encode())


def with_whole_paths(experiment: Experiment) -> Experiment:
    """The experiment with absolute paths, valid for processes in any working directory of this machine."""
    from fewbytes.models.hugging_face import PREFIX

    data, model = experiment.data, experiment.model
    whole: dict[str, Any] = {
        key: _whole(getattr(data, key)) for key in ("dataset", "public", "client_data", "tokenizer")
    }
    parts = [part.rpartition(PREFIX) for part in (model.model or "").split("+")]
    models = "+".join(f"{before}{prefix}{_whole(name) if prefix else name}" for before, prefix, name in parts)
    return dataclasses.replace(
        experiment,
        data=dataclasses.replace(data, **whole),
        model=dataclasses.replace(model, weights=_whole(model.weights), model=models or model.model),
    )


def _whole(name: str | None) -> str | None:
    """A relative path made absolute; paths under FEWBYTES_DATA, and names that are not paths, stay unchanged."""
    if name is None or name == "digits" or name.isdecimal():
        return name
    root = os.environ.get("FEWBYTES_DATA")
    if (root and (Path(root).expanduser() / name).exists()) or not Path(name).expanduser().exists():
        return name
    return str(Path(name).expanduser().absolute())


def allowed(experiment: Experiment, here: bool) -> dict[str, str]:
    """What a node's configuration allows the server to name: the names of this experiment's settings.

    `here`: whether the node is on this machine, so that paths are the user's own.
    """
    from fewbytes.models.hugging_face import PREFIX

    data, model = experiment.data, experiment.model
    models = [part.partition("@")[0] for part in (model.model or "").split("+")]
    places = [data.dataset, data.public, data.client_data, data.tokenizer, model.weights]
    places += [part.removeprefix(PREFIX) for part in models if part.startswith(PREFIX)]
    named = [str(place) for place in places if place and place != "digits" and not str(place).isdecimal()]
    named = [str(Path(place).absolute()) if here and Path(place).exists() else place for place in named]
    names = dict.fromkeys([*experiment.own_code(), *named])
    return {"allow": ",".join(names)} if names else {}
