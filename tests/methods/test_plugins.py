"""Methods are found without a list: by their file, by an entry point, by package.module:Class."""

from __future__ import annotations

import re
from pathlib import Path

import cases
import pytest
import torch
from commands import fewbytes

import fewbytes as fb
from fewbytes.base.named import only_allowed
from fewbytes.methods import FILES, method_class

ROOT = Path(__file__).parents[2]
METHOD = """
from dataclasses import dataclass
import fewbytes as fb

@dataclass(frozen=True)
class {name}(fb.Method):
    def round(self, state: None, net: fb.Network, t: int) -> None:
        pass
"""


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_a_method_with_a_case_and_a_card(name):
    found = method_class(name)
    assert found.__name__.lower() == found().method_name == name
    assert getattr(fb, found.__name__) is found
    assert (Path(cases.__file__).parent / f"{name}.py").exists()
    cards = ROOT / "docs" / "methods"
    assert f"](pictures/{name}.svg)" in (cards / f"{name}.md").read_text("utf-8")
    assert (cards / "pictures" / f"{name}.svg").exists()
    assert f"| [`{name}`]({name}.md) | {found.promises.sends} |" in (cards / "index.md").read_text("utf-8")


def test_what_is_no_method_is_no_attribute():
    for name in ("fedavg", "FEDAVG", "FedSomething", "clustered"):
        with pytest.raises(AttributeError, match=name):
            getattr(fb, name)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package that names classes of a module of its own as methods."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(package: str, text: str, **named: str) -> None:
        (tmp_path / f"{package}.py").write_text(text)
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = "".join(f"{name} = {package}:{attribute}\n" for name, attribute in named.items())
        (about / "entry_points.txt").write_text(f"[fewbytes.methods]\n{points}")

    return installed


def test_an_installed_package_adds_methods(install):
    install("plug_one", METHOD.format(name="FedNew"), fednew="FedNew")
    assert "fednew" in list(fb.METHODS)
    assert len(fb.METHODS) == len(FILES) + 1
    assert method_class("fednew").__name__ == "FedNew"
    with only_allowed(anywhere=False):  # as on a node: what is installed there needs no leave, another's code does
        assert method_class("fednew").__name__ == "FedNew"
        with pytest.raises(fb.UserError, match="is code"):
            method_class("plug_one:FedNew")
    assert method_class("fedavg") is fb.FedAvg


def test_a_class_that_no_run_can_use_is_refused_by_name(install):
    text = METHOD.format(name="FedWrong") + "    lr: Nowhere = 0.1\n"
    install("plug_wrong", "from __future__ import annotations\n" + text)
    with pytest.raises(fb.UserError, match=r"'plug_wrong:FedWrong' .*'Nowhere'"):
        method_class("plug_wrong:FedWrong")


def test_a_default_may_be_made_anew_each_time(install):
    made = "    names: list = field(default_factory=lambda: ['stem'])\n"
    made += "    local: fb.Local = field(default_factory=lambda: fb.Local(epochs=3))\n"
    text = METHOD.format(name="FedMade").replace("import dataclass", "import dataclass, field") + made
    install("plug_four", text, fedmade="FedMade")
    found = method_class("fedmade")
    assert found.defaults()["names"] == ["stem"]
    assert found.defaults()["epochs"] == found().parameters["epochs"] == 3
    assert found(lr=0.5).local == fb.Local(epochs=3, lr=0.5)


def test_what_an_installed_package_gets_wrong_is_told(install):
    install("plug_two", METHOD.format(name="FedOther"), fedother="FedOther", short="FedOther", fedavg="FedOther")
    install("plug_three", METHOD.format(name="FedOther"), fedother="FedOther", gone="Gone", number="__name__")
    for name, why in (
        ("fedother", "plug_three and plug_two each have a method 'fedother'|plug_two and plug_three each"),
        ("fedavg", "fewbytes and plug_two each have a method 'fedavg'"),
        ("short", "plug_two names FedOther 'short': it is fedother"),
        ("gone", "'gone' cannot be imported: AttributeError"),
        ("number", "'number' is not a method"),
    ):
        with pytest.raises(fb.UserError, match=why):
            method_class(name)


WRONG = {
    "Missing": ("", "cannot be imported: AttributeError: .* has no attribute 'Missing'$"),
    "Plain": ("class Plain: pass", "is not a method"),
    "Loose": (METHOD.format(name="Loose").replace("(frozen=True)", ""), "Loose is not a frozen dataclass"),
    "Empty": ("import fewbytes as fb\nclass Empty(fb.Method): pass", "lacks round"),
    "Needy": (METHOD.format(name="Needy") + "    needed: int\n", "no default for needed"),
    "Broken": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero$"),
    "Lacking": ("import wrong_lack", "cannot be imported: ModuleNotFoundError: No module named 'wrong_lack'$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_method_is_told_in_one_line(name, tmp_path, monkeypatch):
    text, why = WRONG[name]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"wrong_{name.lower()}.py").write_text(text)
    with pytest.raises(fb.UserError, match=why) as told:
        method_class(f"wrong_{name.lower()}:{name}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("round_does", "said"),
    [
        (
            "nothing_of_this_name",
            r"mine, round 1: NameError: .* \(mine.py, line 7; FEWBYTES_DEBUG=1 shows the traceback\)",
        ),
        (
            "list(net.call(self.hear, to=[0]))",
            r"client 0, .* 'hear': ZeroDivisionError: .* \(mine.py, line 9\) \(FEWBYTES_DEBUG=1 shows the traceback\)",
        ),
    ],
)
def test_an_error_in_a_method_of_ones_own_says_where(round_does, said, tmp_path):
    hear = "    def hear(self, state: None, message: None, site: fb.Site) -> None:\n        1 / 0\n"
    (tmp_path / "mine.py").write_text(METHOD.format(name="Mine").replace("pass", round_does).lstrip() + hear)
    done = fewbytes("run", "mine:Mine", "--dataset", "digits", "--clients", "2", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(said, done.stderr.splitlines()[-1])


def test_first_weights_changed_in_place_leave_the_problem_as_it_is():
    problem = cases.tiny_task().problem
    before = problem.first_state()
    for value in problem.first_state().values():
        value.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in problem.first_state().items())
