"""Which cases the laws run over: those that cover what methods do, and those that changed since all were run.

`make test-all` ends by `python tests/verified.py`, which writes verified.json beside this file: a digest of each case (its
own file, its method's, and what that imports of `methods/`), and one of what all cases stand on. A case whose digest is
another by now is run by `make test`, too; if the ground is, all are.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from cases import CASES
from modules import MODULES, closure, room

TESTS = Path(__file__).parent
FILE = TESTS / "verified.json"
COVERING = {
    "fedavg": "one model for all",
    "scaffold-sampled": "states of clients' own, some clients a round",
    "fedpurin": "messages that wait for the next request",
    "genefl": "newcomers",
    "fedkgf": "generated kernels",
    "fusefl": "rounds of its own, and a last step",
    "fedktl": "models that differ, a server with a generator",
    "fedbuff": "a stream",
    "dense": "a server that trains",
    "learngene": "clusters",
    "dgc": "what rounding has lost, kept by clients",
    "fedper": "a part of the model that stays at home",
    "separate": "nothing that is sent",
}
GROUND = ("base", "wire", "core", "engines", "running")
"""The rooms that every case stands on."""


def digest(files: Iterable[Path]) -> str:
    """Of files' names and contents."""
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def digests() -> dict[str, str]:
    """By case, and of the ground."""
    methods = [name for name in MODULES if room(name) == "methods"]
    ground = [path for name, path in MODULES.items() if room(name) in GROUND]
    ground += [*TESTS.glob("*.py"), *(TESTS / "laws").glob("*.py"), TESTS / "cases" / "__init__.py"]
    made = {"ground": digest([*ground, TESTS.parent / "pyproject.toml"])}
    for name, method in CASES.items():
        case = TESTS / "cases" / f"{name.partition('-')[0]}.py"
        made[name] = digest([case, *(MODULES[each] for each in closure(type(method).__module__, methods))])
    return made


@functools.cache
def quick_cases() -> frozenset[str]:
    """The cases over which `make test` runs the laws."""
    now, then = digests(), json.loads(FILE.read_text()) if FILE.exists() else {}
    if now["ground"] != then.get("ground"):
        return frozenset(CASES)
    return frozenset(COVERING) | {name for name in CASES if now[name] != then.get(name)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
