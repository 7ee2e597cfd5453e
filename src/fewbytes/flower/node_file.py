"""The file that describes a resident node: `fewbytes deploy` writes it, `fewbytes node` reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import tomli_w

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import UserError, one_line
from fewbytes.base.files import replacing
from fewbytes.core.site_policy import SitePolicy


class NodeFile(msgspec.Struct, forbid_unknown_fields=True):
    """A node's SuperLink (host:port), the files of its CA certificate and of the node's private key, and the node's
    configuration. Paths are relative to the file's folder."""

    superlink: str
    ca: str
    key: str
    config: dict[str, str | int | float | bool]

    @classmethod
    def read(cls, path: Path) -> NodeFile:
        """Read a file. Raises UserError if it cannot be read or is invalid."""
        try:
            about = msgspec.toml.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise UserError(f"{path}: there is no such file") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a node's file, as `fewbytes deploy` writes it: {one_line(error)}") from None
        host_and_port(about.superlink, f"{path}: superlink")
        me = about.config.get("partition-id", 0)  # a node's registered name, too, says whose data it has
        if not isinstance(me, int) or me < 0:
            raise UserError(f"{path}: partition-id is {me!r}: expected the number of the client whose data are here")
        try:
            SitePolicy.read(about.config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        return about

    def placed(self, folder: Path) -> NodeFile:
        """The same with paths that do not depend on the working directory, where the file lies in a folder."""
        config = dict(self.config)
        for key in ("folder", "client-data"):
            if key in config and (key == "folder" or (folder / str(config[key])).exists()):
                config[key] = os.path.normpath(folder / str(config[key]))
        return NodeFile(self.superlink, str(folder / self.ca), str(folder / self.key), config)

    def text(self) -> str:
        """The file's text."""
        return tomli_w.dumps(msgspec.structs.asdict(self))


def name_server(path: Path, superlink: str) -> None:
    """Have a node's file name another address (host:port) of its SuperLink; the rest of the text stays as it is.

    Raises UserError for an invalid address or file."""
    host_and_port(superlink, "the server's address")
    NodeFile.read(path)
    text = re.sub(r"^superlink\s*=.*$", f'superlink = "{superlink}"', path.read_text(), count=1, flags=re.MULTILINE)
    with replacing(path) as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        file.write(text.encode())
