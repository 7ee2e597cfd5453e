"""The file that says what a resident node is: `fewbytes deploy` writes it, `fewbytes node` reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import tomli_w

from fewbytes.base.errors import UserError, one_line


class NodeFile(msgspec.Struct, forbid_unknown_fields=True):
    """Where a node's SuperLink is (host:port), the files of the certificate that proves it and of the node's private
    key, and the node's configuration. Paths are meant from the file's folder."""

    superlink: str
    ca: str
    key: str
    config: dict[str, str | int | float | bool]

    @classmethod
    def read(cls, path: Path) -> NodeFile:
        """Raises UserError for a file that cannot be read, or says something else."""
        try:
            return msgspec.toml.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a node's file, as `fewbytes deploy` writes it: {one_line(error)}") from None

    def text(self) -> str:
        """As it is written."""
        return tomli_w.dumps(msgspec.structs.asdict(self))
