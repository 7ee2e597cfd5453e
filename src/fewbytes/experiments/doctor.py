"""Checks what is installed on this machine, and which parts of the package work here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from fewbytes.base.cores import available_cores
from fewbytes.base.errors import UserError
from fewbytes.core.devices import check_device

SHARED = Path("/dev/shm")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<part>[\w-]+)\])?.*extra == ['\"](?P<extra>[\w-]+)['\"]")
LITTLE = 256e6  # bytes of shared memory: long replies pass through it


@dataclass(frozen=True)
class Finding:
    """A line of the result: its subject, the finding, and how to fix it (empty: it works)."""

    about: str
    words: str
    fix: str = ""


def findings() -> Iterator[Finding]:
    """All findings, one after another."""
    yield Finding("fewbytes", f"{version('fewbytes')}, Python {platform.python_version()} on {platform.system()}")
    yield Finding("torch", str(torch.__version__))
    yield _gpu()
    yield Finding("cores", f"{available_cores()} to run on, of {os.cpu_count()}")
    yield _memory()
    yield Finding("workers", "processes" if sys.platform == "linux" else "none: handlers run in one process")
    yield from _extras()
    yield _data()


def _gpu() -> Finding:
    try:
        check_device("cuda")
    except UserError as error:
        why = str(error).partition("here: ")[2].removesuffix(": use cpu").split(". ")[0]
        return Finding("GPU", f"none that PyTorch can use ({why})")
    return Finding(
        "GPU", "usable by PyTorch with --device cuda; start nvidia-cuda-mps-control -d to share it among workers"
    )


def _memory() -> Finding:
    if not SHARED.is_dir():
        return Finding("shared memory", "no /dev/shm: workers exchange replies through files")
    free = shutil.disk_usage(SHARED).free
    fix = "" if free > LITTLE else "provide more (for a container: --shm-size=1g)"
    return Finding("shared memory", f"{free / 1e6:,.0f} MB free in /dev/shm", fix)


def _extras() -> Iterator[Finding]:
    """Each extra, and which of its packages are installed."""
    wanted: dict[str, list[str]] = {}
    for text in requires("fewbytes") or ():
        found = _REQUIREMENT.match(text)
        if found and found["extra"] not in ("all", "dev", "docs") and found["name"] != "fewbytes":
            parts = _of_extra(found["name"], found["part"]) if found["part"] else []
            wanted.setdefault(found["extra"], []).extend(dict.fromkeys([found["name"], *parts]))
    for extra, packages in wanted.items():
        there = {name: version for name in packages if (version := _version(name))}
        missing = [name for name in packages if name not in there]
        words = ", ".join(f"{name} {version}" for name, version in there.items())
        if missing:
            words = f"not installed: {', '.join(missing)} (pip install 'fewbytes[{extra}]')"
        yield Finding(extra, words)


def _of_extra(package: str, extra: str) -> list[str]:
    """The packages that an extra of an installed package needs."""
    texts = requires(package) or () if _version(package) else ()
    found = filter(None, map(_REQUIREMENT.match, texts))
    return [each["name"] for each in found if each["extra"] == extra]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _data() -> Finding:
    folder = os.environ.get("FEWBYTES_DATA")
    if not folder:
        return Finding("data", "digits are included; FEWBYTES_DATA is not set, so other datasets are downloaded")
    if not Path(folder).is_dir():
        return Finding("data", f"FEWBYTES_DATA is {folder}", "there is no such folder: correct it")
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    return Finding("data", f"{', '.join(names) or 'nothing'} in {folder}")
