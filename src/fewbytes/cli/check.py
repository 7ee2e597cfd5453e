"""The command `check`: looks at a site, or at a server, before any run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fewbytes.base.errors import UserError
from fewbytes.cli.shared import NAME, AsJson
from fewbytes.experiments.display import printed

if TYPE_CHECKING:
    from fewbytes.federation.preflight import Step
    from fewbytes.flower.node_file import NodeFile

STYLES = {"ok": "green", "wrong": "bold red", "not looked at": "yellow"}


def check(
    server: Annotated[
        str | None, typer.Argument(help="At a site: the server (default: superlink in node.toml).", metavar="HOST:PORT")
    ] = None,
    node: Annotated[Path, typer.Option(help="At a site: the node's folder, or its file.", metavar="PATH")] = Path(
        "node.toml"
    ),
    config: Annotated[
        Path | None, typer.Option(help="At a site: read the data as a run with this config.toml does.")
    ] = None,
    federation: Annotated[
        Path | None, typer.Option(metavar="DIR", help="At the server: the federation's folder.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="At the server: a deployment's run folder.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="At the server: host:port where sites reach it.", metavar="HOST:PORT")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="At the server: host:port where it listens, if different.", metavar="HOST:PORT")
    ] = None,
    out: Annotated[Path, typer.Option(help="At the server: the folder to create run folders in.")] = Path("runs"),
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.", min=0.1, max=600)] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check a site, or the server, before any run: a line for each thing, and what to do. Exit code 1: one is wrong.

    At a site: `fewbytes check --node north` (HOST:PORT: the server that node.toml must name). At the server:
    `fewbytes check --federation DIR`.
    """
    at_server = [each for each in (federation, resume, address) if each is not None]
    if len(at_server) > 1:
        raise UserError("give one of --federation, --resume and --address")
    if at_server and (server is not None or config is not None):
        raise UserError("HOST:PORT and --config are for a site; leave them out at the server")
    if listen is not None and address is None:
        raise UserError("--listen needs --address")
    if at_server:
        steps = _server_steps(federation, resume, (address, listen), out, timeout)
    else:
        steps = _site_steps(node / "node.toml" if node.is_dir() else node, server, config, timeout)
    from fewbytes.federation.preflight import WRONG, lines

    found = []
    for line in lines(steps):
        found.append(line)
        if not as_json:
            words = Text.assemble((f"{line.about:<12}", NAME), (f"{line.state:<14}", STYLES[line.state]), line.words)
            printed.print(words, soft_wrap=True)
    if as_json:
        print(json.dumps([line._asdict() for line in found], indent=2))
    if any(line.state == WRONG for line in found):
        raise typer.Exit(1)


def _site_steps(file: Path, server: str | None, config: Path | None, seconds: float) -> list[Step]:
    from fewbytes.base.named import look_in
    from fewbytes.experiments.site_data import read_site_data
    from fewbytes.federation.preflight import Site, Unasked

    if server is None and not file.exists():
        raise UserError(
            f"{file}: there is no such file: name the node's folder (--node), or the server with --federation"
        )
    file, config = file.absolute(), None if config is None else config.absolute()

    def read_data(about: NodeFile) -> str:
        if "client-data" not in about.config:
            raise Unasked("node.toml does not set client-data")
        os.chdir(file.parent)  # where the node runs
        look_in(str(file.parent))
        return read_site_data(str(about.config["client-data"]), about.config, config)

    return Site(file, server, seconds, read_data).steps()


def _server_steps(
    federation: Path | None, resume: Path | None, address: tuple[str | None, str | None], out: Path, seconds: float
) -> list[Step]:
    from fewbytes.experiments.places import remembered
    from fewbytes.federation.server_preflight import Server, of_federation

    if federation is not None:
        return of_federation(federation, out, seconds).steps()
    if resume is None:
        assert address[0] is not None
        return Server(address[0], address[1], out, seconds).steps()
    there = remembered(resume, dict.fromkeys(("hosts", "address", "listen", "node", "federation")))
    if there["federation"] is not None:
        return of_federation(Path(there["federation"]), resume, seconds).steps()
    folder = resume / "deployment"
    keys = {path.stem: path.read_text() for path in sorted((folder / "keys").glob("*.pub"))}
    where = str(there["address"])
    return Server(where, there["listen"], resume, seconds, folder / "certificates", keys).steps()
