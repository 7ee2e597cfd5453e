"""Commands for the members of a federation, at the server and at the sites."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from fewbytes.cli.machines import be_nodes
from fewbytes.cli.shared import AsJson
from fewbytes.experiments.display import console, printed

Folder = Annotated[Path, typer.Option("--folder", metavar="DIR", help="The federation's folder.")]
Name = Annotated[str, typer.Argument(help="The site's name.")]
HERE = Path("federation")
HELP = {"help_option_names": ["-h", "--help"]}

federation = typer.Typer(
    no_args_is_help=True,
    context_settings=HELP,
    help="Manage the members of a federation: a folder that outlives runs. Sites make their own keys.",
)


def _say(text: str) -> None:
    console.print(Text(text), soft_wrap=True)


@federation.command()
def init(
    address: Annotated[str, typer.Option(help="host:port where the sites reach this machine.")],
    listen: Annotated[str | None, typer.Option(help="host:port where it listens, if different.")] = None,
    folder: Folder = HERE,
) -> None:
    """Make a federation, with its own CA; certificates of your CA in DIR/certificates are checked and used instead.

    Example: `fewbytes federation init --address server.example:9092`
    """
    from fewbytes.federation.members import make

    make(folder, address, listen)
    where = "" if folder == HERE else f" --folder {quote(str(folder))}"
    _say(f"{folder} is made. Next, for each site: fewbytes federation invite NAME{where} > NAME.invitation")


@federation.command()
def invite(name: Name, folder: Folder = HERE) -> None:
    """Print a site's invitation, also for one that needs a new key. It is not secret, but must arrive unchanged."""
    from fewbytes.federation import members

    text = members.invite(folder, name).line()
    _say(f"Send this to {name}, which runs: fewbytes node init {name} --invitation FILE > {name}.request")
    print(text)


@federation.command()
def join(
    request: Annotated[str, typer.Argument(help="The site's request: the text, or its file.")], folder: Folder = HERE
) -> None:
    """Accept a site's request: its key is registered, also in a running deployment, and replaces an earlier one."""
    from fewbytes.federation import members
    from fewbytes.federation.texts import Request, fingerprint

    asked = Request.read(request)
    what = members.join(folder, asked)
    words = {
        "joined": "is a member now",
        "replaced": "has a new key; the old one is refused",
        "unchanged": "is a member",
    }
    _say(f"{asked.name} {words.get(what, 'is a member')}. Compare by telephone: {fingerprint(asked.key)}")


@federation.command(name="list")
def list_members(folder: Folder = HERE, as_json: AsJson = False) -> None:
    """List members, open invitations and when certificates expire."""
    from fewbytes.federation import members
    from fewbytes.federation.texts import fingerprint
    from fewbytes.flower.certificates import days_left, expiry_note

    there, certificates = members.read(folder), folder / members.CERTIFICATES
    rows = [{"name": m.name, "key": fingerprint(m.key), "since": m.since} for m in there.members]
    days = {name: int(days_left(certificates / f)) for name, f in (("server", "server.pem"), ("ca", "ca.crt"))}
    if as_json:
        about: dict[str, Any] = {"address": there.address, "listen": there.listen, "members": rows}
        print(json.dumps(about | {"invited": there.invited, "days_left": days}, indent=2))
        return
    for row in rows:
        printed.print(Text(f"{row['name']:20} {row['key']}  since {row['since']}"), soft_wrap=True)
    for name in there.invited:
        printed.print(Text(f"{name:20} invited"))
    printed.print(Text(f"{there.address}; certificates: server {days['server']} days left, CA {days['ca']}"))
    if why := expiry_note(certificates):
        _say(why)


@federation.command()
def remove(name: Name, folder: Folder = HERE) -> None:
    """Remove a member: its key is refused for good, within seconds also by a running deployment."""
    from fewbytes.federation import members

    members.remove(folder, name)
    _say(f"{name} is no longer a member")


@federation.command()
def renew(
    address: Annotated[str | None, typer.Option(help="A new host:port where the sites reach this machine.")] = None,
    listen: Annotated[str | None, typer.Option(help="A new host:port where it listens.")] = None,
    folder: Folder = HERE,
) -> None:
    """Issue the server's certificate again, for a new address if it moves. Sites keep their CA and keys."""
    from fewbytes.federation import members

    members.renew_certificate(folder, address, listen)
    _say("the certificate is renewed; a running deployment serves it within seconds")
    if address is not None:
        _say(f"every site runs: fewbytes node moved FOLDER {address}")


class _Start(TyperGroup):
    """A group whose command `start` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = not args or args[0] in self.commands or args[0] in HELP["help_option_names"]
        return super().parse_args(ctx, args if own else ["start", *args])


node = typer.Typer(
    cls=_Start,
    no_args_is_help=True,
    context_settings=HELP,
    help="Start a node (`node FILE`), make one (`node init`), or point it at a server that has moved (`node moved`).",
)
node.command("start")(be_nodes)


@node.command("init")
def init_node(
    name: Name,
    invitation: Annotated[str, typer.Option(help="The server's invitation: the text, or its file.")],
    folder: Annotated[Path | None, typer.Option(help="The node's new folder (default: its name).")] = None,
) -> None:
    """Make a site's key and its node's folder, and print the request to send to the server. The key never leaves.

    Example: `fewbytes node init north --invitation north.invitation > north.request`
    """
    from fewbytes.experiments.hosts import write_site
    from fewbytes.federation.texts import Invitation, fingerprint

    request = write_site(where := folder or Path(name), Invitation.read(invitation), name)
    start = f"sh {quote(f'{where}/start.sh')}"
    _say(f"{where} is made. Set client-data in {where}/node.toml, send the request, start: {start}")
    _say(f"the key's fingerprint, to compare by telephone: {fingerprint(request.key)}")
    print(request.line())


@node.command("moved")
def move_server(
    folder: Annotated[Path, typer.Argument(help="The node's folder, or its file.")],
    address: Annotated[str, typer.Argument(help="host:port where the server is now.")],
) -> None:
    """Tell a node that its server has moved. A running node follows within seconds.

    Example: `fewbytes node moved north new.example:9092`
    """
    from fewbytes.flower.node_file import name_server

    path = folder / "node.toml" if folder.is_dir() else folder
    name_server(path, address)
    _say(f"{path} names {address} now; a running node follows")
