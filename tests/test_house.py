"""The house: imports point one way, and what is heavy is imported only where it is used."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from modules import MODULES, PRIVATE, closure, imports_of, private_parts, room

import fewbytes

FLOORS = [
    ["base"],
    ["wire", "models", "data", "mailbox"],
    ["codec"],
    ["core"],
    ["generators"],
    ["methods", "engines"],
    ["running"],
    ["report", "flower", "nvflare"],
    ["federation"],
    ["experiments"],
    ["analysis"],
    ["reproduce"],
    ["cli"],
    ["names"],  # what the package offers
    ["", "__main__"],  # the package itself, and its command
]
"""A room may import itself and the floors below its own."""
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor}
ONLY = {"flwr": "flower", "nvflare": "nvflare", "typer": "cli", "jinja2": "report"}
ROOT = Path(__file__).parents[1]

IMPORTS = {name: imports_of(path) for name, path in MODULES.items()}


def test_imports_point_down_the_floors():
    upward = [
        f"{module} imports {each}"
        for module, imported in IMPORTS.items()
        for each in sorted(imported)
        if each.split(".")[0] == "fewbytes" and room(each) != room(module) and LEVEL[room(each)] >= LEVEL[room(module)]
    ]
    assert not upward


def test_no_module_asks_its_package_which_finds_its_names_when_asked():
    """It would ask the package's `__getattr__`, and that might import the module that asks."""
    lazy = {name for name, path in MODULES.items() if path.name == "__init__.py" and "__getattr__" in path.read_text()}
    asking = {
        module: node.names[0].name
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in lazy and module.startswith(f"{node.module}.")
    }
    assert {"fewbytes.data", "fewbytes.models"} <= lazy
    assert not asking


def test_no_modules_import_each_other_in_a_circle():
    within = {module: {each for each in imported if each in MODULES} for module, imported in IMPORTS.items()}
    tuple(graphlib.TopologicalSorter(within).static_order())  # raises CycleError with the circle


def test_a_runs_promises_know_nothing_of_each_other():
    folder = "fewbytes.running.promises."
    promises = {name for name in MODULES if name.startswith(folder)} - {f"{folder}promise", f"{folder}every"}
    assert len(promises) > 9
    assert not {name: IMPORTS[name] & promises for name in promises if IMPORTS[name] & promises}


def test_who_reads_a_method_need_not_read_the_house():
    """All that FedAvg imports, directly or not."""
    read = closure("fewbytes.methods.fedavg", MODULES)
    assert len(read) <= 40
    assert sum(len(MODULES[name].read_text("utf-8").splitlines()) for name in read) <= 6000


def test_classes_and_what_makes_them_stay_small():
    """At most 250 lines a class, and 20 lines and six parameters a constructor."""
    large = []
    for path in MODULES.values():
        for each in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            made = next((f for f in each.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
            lines = each.end_lineno - each.lineno + 1, 0 if made is None else made.end_lineno - made.lineno + 1
            parameters = 0 if made is None else len(made.args.args) - 1 + len(made.args.kwonlyargs)
            if lines[0] > 250 or lines[1] > 20 or parameters > 6:
                large.append(each.name)
    assert not large


def test_modules_of_tests_have_names_of_their_own():
    """Every folder of tests is on the path of imports: of two modules of one name, only the first is ever imported."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.stem for path in modules]
    assert sorted(names) == sorted(set(names))
    folders = {path.parent.name for path in modules} - {"tests", "nvflare"}  # the library, in its own environment
    imported = {name.split(".")[0] for path in modules for name in imports_of(path)}
    both = folders & imported
    assert not both


@pytest.mark.parametrize("library", ONLY)
def test_a_library_has_one_room(library):
    importing = {room(module) for module, names in IMPORTS.items() if any(n.split(".")[0] == library for n in names)}
    assert importing == {ONLY[library]}


def test_private_parts_of_flower_are_imported_in_one_place():
    elsewhere = {module: private_parts(module) for module in MODULES if not module.startswith(PRIVATE)}
    assert not {module: parts for module, parts in elsewhere.items() if parts}


def test_a_page_says_of_every_private_part_of_flower_what_it_is_for():
    listed = {}
    for section in (ROOT / "docs" / "flower-private.md").read_text().split("\n## private/")[1:]:
        rows = re.findall(r"^\| `([\w.]+)`(?:: ([^|]+))? \|", section.partition("\n## ")[0], re.MULTILINE)
        names = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
        listed[section.partition(".py")[0]] = {
            f"{module}.{name}".rstrip(".") for module in names for name in names[module] or [""]
        }
    used = {module.rpartition(".")[2]: private_parts(module) for module in MODULES if module.startswith(PRIVATE)}
    assert listed == {name: parts for name, parts in used.items() if parts}


def test_the_package_imports_nothing_that_only_some_need():
    code = "import sys; from fewbytes import *; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "torch" in loaded
    assert not {"flwr", "nvflare", "typer", "jinja2", "sklearn", "torchvision"} & set(loaded)


@pytest.mark.parametrize("command", [[], ["run"], ["probe"]])
def test_help_comes_without_torch(command):
    code = (
        f"import sys; sys.argv = ['fewbytes', *{command}, '--help']\n"
        "from fewbytes.__main__ import main\n"
        "try: main()\n"
        "finally: print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    )
    printed, _, loaded = subprocess.check_output([sys.executable, "-c", code], text=True).partition("loaded:")
    assert "Usage: fewbytes" in printed
    assert not {"torch", "numpy", "flwr"} & set(loaded.split())


def test_keys_are_made_without_torch(tmp_path):
    """By a site's computer of its own, too, whose operator waits for them."""
    code = (
        "import sys; from fewbytes.__main__ import main; from contextlib import suppress\n"
        "def fewbytes(*words):\n"
        "    sys.argv = ['fewbytes', *words]\n"
        "    with suppress(SystemExit): main()\n"
        "fewbytes('federation', 'init', '--address', 'server.example:9092')\n"
        "sys.stdout = open('invitation', 'w'); fewbytes('federation', 'invite', 'north'); sys.stdout.close()\n"
        "sys.stdout = open('request', 'w'); fewbytes('node', 'init', 'north', '--invitation', 'invitation')\n"
        "sys.stdout.close(); sys.stdout = sys.__stdout__\n"
        "fewbytes('federation', 'join', 'request'); fewbytes('node', 'moved', 'north', 'new.example:9092')\n"
        "fewbytes('federation', 'list'); print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    listed, _, loaded = done.stdout.partition("loaded:")
    assert listed.startswith("north "), done.stderr
    assert 'superlink = "new.example:9092"' in (tmp_path / "north" / "node.toml").read_text()
    assert not {"torch", "flwr"} & set(loaded.split())


def test_public_names_are_found_when_they_are_used():
    assert set(fewbytes.__all__) <= set(dir(fewbytes))
    assert fewbytes.wire.pack is fewbytes.pack
    with pytest.raises(AttributeError, match="FedAvgg"):
        fewbytes.FedAvgg  # noqa: B018
    with pytest.raises(ImportError, match="FedAvgg"):
        from fewbytes import FedAvgg  # noqa: F401


def test_every_extra_is_in_the_table_of_them():
    section = (ROOT / "docs" / "command-line.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == extras.keys() - {"docs", "dev"}
