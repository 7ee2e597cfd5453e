"""The application that `fewbytes deploy` submits: its files, and a check that a bundle holds exactly them."""

from __future__ import annotations

import hashlib
import io
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import tomli_w

REQUIREMENT = "flwr>=1.40,<1.43"
APPS = 'from fewbytes.experiments.app import client, server\n\n__all__ = ["client", "server"]\n'
"""All the code of the application that `fewbytes deploy` submits: its file apps.py."""
APPLICATION = "fewbytes/fewbytes-run 1.0.0"
"""Its publisher, name and version."""
EVENTS = "deployment/events.jsonl"
"""The file in a run folder to which the server writes events for `fewbytes deploy`, if that made the folder."""
MANIFEST = ".info/CONTENT"
"""The list of its files that Flower adds to an application's bundle."""
BUNDLE_BYTES, UNPACKED_BYTES = 1 << 18, 1 << 20  # of a bundle, and of all in it


def app_config(server: str, client: str, run_config: Mapping[str, Any]) -> str:
    """The pyproject.toml of an app; its components are named `module:attribute`."""
    described = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": "fewbytes-run", "version": "1.0.0", "description": "A run of fewbytes",
            "license": {"file": "LICENSE"},
            "dependencies": [REQUIREMENT, "fewbytes"],
        },
        "tool": {"flwr": {"app": {
            "publisher": "fewbytes", "fab-format-version": 1, "flwr-version-target": "1.40.0",
            "components": {"serverapp": server, "clientapp": client},
            "config": dict(run_config),
        }}},
    }  # fmt: skip
    return tomli_w.dumps(described)


def application_files(run_config: Mapping[str, Any]) -> dict[str, str]:
    """The files of the application that `fewbytes deploy` submits, by name; only the run's settings differ."""
    config = app_config("apps:server", "apps:client", run_config)
    return {"pyproject.toml": config, "apps.py": APPS, "LICENSE": "Apache-2.0\n"}


def manifest_of(files: Mapping[str, bytes]) -> list[str]:
    """Flower's manifest of an application's files, one line each in any order; a node reads the files that it names."""
    return sorted(f"{name},{hashlib.sha256(data).hexdigest()},{8 * len(data)}" for name, data in files.items())


def is_installed(bundle: bytes) -> bool:
    """Whether an application's bundle (a zip file) holds the files of `application_files`, their manifest, and nothing
    else.

    Unknown files are refused, as Python runs more than .py files (bytecode, extensions, packages of any name, .pth).
    """
    if len(bundle) > BUNDLE_BYTES:
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as there:
            members = there.infolist()
            packed = {member.compress_type for member in members} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
            known = sorted(member.filename for member in members) == sorted([*application_files({}), MANIFEST])
            if packed or not known or sum(member.file_size for member in members) > UNPACKED_BYTES:
                return False
            files = {member.filename: there.read(member) for member in members}
        listed = files.pop(MANIFEST).decode().splitlines()
        described = tomllib.loads(files["pyproject.toml"].decode())
        wanted = application_files(described["tool"]["flwr"]["app"]["config"])
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        KeyError,
        NotImplementedError,
        OSError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        return False
    same = all(files[name] == text.encode() for name, text in wanted.items() if name != "pyproject.toml")
    return same and described == tomllib.loads(wanted["pyproject.toml"]) and sorted(listed) == manifest_of(files)
