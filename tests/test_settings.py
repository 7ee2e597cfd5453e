"""Settings are declared once: files, Flower's run config, options and Python's arguments all follow."""

from __future__ import annotations

import functools
import re
import tempfile
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import hypothesis
import msgspec
import pytest
import typer
from cases import TinyNet, tiny_data, tiny_task
from hypothesis import strategies as st
from msgspec import Meta
from typer.testing import CliRunner

import fewbytes as fb
from fewbytes.cli.app import app
from fewbytes.cli.shared import with_settings
from fewbytes.core.links import Links
from fewbytes.core.policy import Excluded
from fewbytes.core.promise import Privacy
from fewbytes.core.rules import Rule
from fewbytes.core.speeds import Speeds
from fewbytes.core.uplink import RANGE, UplinkBits
from fewbytes.core.weights import ClassWeights
from fewbytes.data import PARTITIONS, Partition
from fewbytes.data.settings import Shift
from fewbytes.experiments.app import read_run_config
from fewbytes.experiments.config_file import read_experiment
from fewbytes.experiments.groups import DECLARED, GROUPS
from fewbytes.experiments.settings import make_experiment
from fewbytes.models.lora import Lora
from fewbytes.models.normalisation import Normalisation
from fewbytes.running.settings import Settings
from fewbytes.running.stopping import StopWhen

DOCS = Path(__file__).parents[1] / "docs"
METHOD: dict[str, Any] = {"method": "fedavg", "parameters": {"batch": 20}}
BESIDE: dict[str, dict[str, Any]] = {
    "partition_options": {"partition": "flwr:IidPartitioner"},
    "stay": {"newcomers": 1, "rounds": 10**9, "arrival": 2},
    "known_classes": {"newcomers": 1, "rounds": 10**9, "arrival": 2},
    "newcomer_classes": {"newcomers": 1, "rounds": 10**9, "arrival": 2},
    "arrival": {"newcomers": 1, "rounds": 10**9},
    "newcomers_a_round": {"newcomers": 3, "rounds": 10**9, "arrival": 2},
    "ray_address": {"engine": "flower-simulation"},
}
"""Settings without which another one cannot be."""
WRITTEN: dict[type, list[str]] = {
    StopWhen: ["patience=5", "f1/global>=0.5", "loss/personalised<=1e-05"],
    Rule: ["median", "trimmed-mean=0.1", "krum=2", "norm-clip", "norm-clip=1.5"],
    Privacy: ["epsilon=8,delta=1e-05,clip=0.5", "of=samples,epsilon=0.5,delta=0.001,clip=2,noise=seeded"],
    UplinkBits: ["0.5", "3.14159265", "auto=1000000B/s"],
    Speeds: ["1,2.5,10", "10x"],
    Links: ["1250000B/s,125000B/s-30s/600s", "7B/s"],
    Excluded: ["3,7", "0"],
    Lora: ["rank=4", "rank=8,alpha=16", "rank=2,alpha=1,targets=q_proj+v_proj"],
    Normalisation: ["imagenet", "data", "0.5/0.25", "0.1,0.2,1234567.8/1,2,3e-07"],
    Shift: ["noise=0.5", "noise=1234567.8", "rotation=60"],
    ClassWeights: ["1,2", "0.125,0,3", "balanced"],
}
"""What is written of values of a class that reads text."""
TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=8)
NAME = st.text(st.characters(codec="ascii", categories=("Ll", "Lu")), min_size=1, max_size=8)
PLAIN = {bool: st.booleans(), str: TEXT | st.sampled_from(PARTITIONS), type(None): st.none()}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a setting's type declares."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limits = {name: end for each in args if isinstance(each, Meta) for name in ("gt", "ge", "lt", "le")
                  if (end := getattr(each, name)) is not None}  # fmt: skip
        return numbers(args[0], **limits) if args[0] in (int, float) else values_of(args[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values_of(arg) for arg in args if arg is not type(None)))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is dict:
        return st.dictionaries(NAME, values_of(args[1]) if args[1] is not Any else st.integers(0, 9) | NAME, min_size=1)
    if origin is tuple and args[-1] is ...:
        return st.lists(values_of(args[0]), min_size=1, max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin in (list, Sequence):
        element = NAME if args[0] is str else st.integers(0, 99)
        return st.lists(element, min_size=1, max_size=3)
    if kind in (int, float):
        return numbers(kind)
    return PLAIN[kind] if kind in PLAIN else st.sampled_from(WRITTEN[kind]).map(kind.read)


def numbers(kind: type, gt: float = -1e9, ge: float = -1e9, lt: float = 1e9, le: float = 1e9) -> st.SearchStrategy[Any]:
    """Whole numbers or others within these ends."""
    low, high = max(gt, ge), min(lt, le)
    if kind is int:
        return st.integers(int(low), int(high))
    return st.floats(low, high, exclude_min=gt >= ge, exclude_max=lt <= le)


def flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """A run config as Flower hands it to an app."""
    pairs: dict[str, Any] = {}
    for key, value in table.items():
        pairs |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return pairs


def options(key: str, value: Any) -> list[str]:
    """A setting as the command line spells it; nothing where it has no option."""
    each = DECLARED[key]
    if each.about.option is None:
        return []
    name, _, other = each.about.option.partition("/")
    name = name or f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [name if value else other] if value or other else []
    if isinstance(value, dict):
        return [f"{name}={k}={v}" for k, v in value.items()]
    return [f"{name}={value if each.text is None else each.text.write(value)}"]


@functools.cache
def command() -> Any:
    """A command that has the options of an experiment, and returns what was named."""
    shown = typer.Typer()

    @shown.command()
    @with_settings
    def show(settings: dict[str, Any]) -> None:
        SEEN.append(settings)

    return typer.main.get_command(shown)


SEEN: list[dict[str, Any]] = []


@pytest.mark.parametrize("key", DECLARED)
@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[*hypothesis.HealthCheck])
@hypothesis.given(data=st.data())
def test_what_a_setting_is_survives_files_flower_the_command_line_and_python(key, data):
    each = DECLARED[key]
    value = data.draw(values_of(each.kind).filter(lambda value: value != each.default))
    base = METHOD | {"clients": 7} | BESIDE.get(key, {})
    try:
        experiment = make_experiment(base | {key: value})
    except fb.UserError:
        hypothesis.reject()  # which must be another's doing: of values that are all refused the test fails
    (group,) = (name for name in GROUPS if key in GROUPS[name].declared())
    assert getattr(getattr(experiment, group), each.name) == value
    assert experiment.settings().keys() >= {"method", "parameters", key}
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(experiment.toml())
        file.flush()
        assert make_experiment(read_experiment(Path(file.name))).settings() == experiment.settings()
    config = flat(experiment.run_config())
    assert {type(value) for value in config.values()} <= {str, int, float, bool}
    assert make_experiment(read_run_config(config)).settings() == experiment.settings()
    if given_as := options(key, value):
        command().main(given_as, standalone_mode=False)
        there = make_experiment(base | SEEN.pop()).settings()
        assert str(there.pop(key)) == str(experiment.settings()[key])  # of text or a number it is text
        assert there == {name: value for name, value in experiment.settings().items() if name != key}
    made = GROUPS[group]
    if each.text is not None and made in (Settings, fb.Policy, Partition):  # those that Python makes
        beside = {made.declared()[k].name: v for k, v in BESIDE.get(key, {}).items() if k in made.declared()}
        assert getattr(made(**beside, **{each.name: each.text.write(value)}), each.name) == value


def test_brief_settings_are_named_only_where_they_are_not_the_default():
    plain = make_experiment(METHOD).settings()
    assert not {key for key, each in DECLARED.items() if each.about.brief} & plain.keys()
    assert {"alpha", "rounds", "coding", "min_replies"} <= plain.keys()
    assert make_experiment(METHOD | {"newcomers": 1, "arrival": 4}).settings()["arrival"] == 4


def test_help_groups_the_options_and_shows_their_defaults():
    text = CliRunner().invoke(app, ["run", "--help-all"]).output
    for group in GROUPS.values():
        panel = re.search(rf"─ {group.title} ─(.*?)╰", text, re.DOTALL)
        assert panel is not None, group.title
        words = " ".join(re.sub("│", " ", panel[1]).split())
        for key, each in group.declared().items():
            if each.about.option is None:
                continue
            option = each.about.option.partition("/")[0] or f"--{key.replace('_', '-')}"
            about = words.split(f"{option} ", 1)[1].split(" --")[0]
            if type(each.default) in (int, float, str):
                assert about.endswith(f"[default: {each.default}]")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"round": 3}, "there is no setting 'round' (did you mean 'rounds'?)"),
        ({"clients": 0}, "clients must be at least 1, not 0"),
        ({"clients": "many"}, "clients must be a whole number of at least 1, not 'many'"),
        ({"part": float("nan")}, "part must be finite, not nan"),
        ({"coding": 1}, "coding must be true or false, not 1"),
        ({"engine": "ray"}, "engine is one of local, flower-simulation, flower-deployment, not 'ray'"),
        ({"over_selection": 11.0}, "over_selection must be in [0, 10], not 11.0"),
        ({"samples": "500"}, "samples is training/test samples per client, like 500/100, not '500'"),
        ({"samples": "500-100"}, "samples is training/test samples per client, like 500/100, not '500-100'"),
        ({"known_classes": "0,one"}, "known_classes is a list of class numbers, like 0,1,2, not '0,one'"),
        ({"class_names": "a,b"}, "class_names is a list, not 'a,b'"),
        ({"dataset": 3}, "dataset must be text, not 3"),
        ({"public": 1.5}, "public must be text or a whole number of at least 1, not 1.5"),
        ({"uplink_bits": 0.05}, "uplink_bits is a number from 0.1 to 16"),
        ({"downlink_bits": 17.0}, "downlink_bits is a number from 0.1 to 16, or 32: not at all, not 17.0"),
        ({"downlink_bits": 0.05}, "downlink_bits is a number from 0.1 to 16, or 32: not at all, not 0.05"),
        ({"bits": 20}, "bits is a number from 0.1 to 16 (uplink_bits also takes auto=RATE"),
        ({"bits": "auto"}, "bits is a number from 0.1 to 16 (uplink_bits also takes auto=RATE"),
        ({"bits": 10**400}, "bits is a number from 0.1 to 16"),
        ({"bits": True}, "bits must be a number, not True"),
        ({"bits": 1.0, "uplink_bits": 0.5}, "bits rounds uploads and downloads: leave out uplink_bits"),
        ({"uplink_bits": 0.5, "uplink_step": 1.0}, "uplink_bits and uplink_step both set"),
        ({"uplink_step": 1.0, "coding": False}, "rounding saves bytes only with coding"),
        ({"method": None}, "name a method"),
    ],
)
def test_what_a_setting_cannot_be_is_said_in_one_line(given, says):
    with pytest.raises(fb.UserError) as error:
        make_experiment(METHOD | given)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_help_and_errors_name_one_range_of_bits():
    declared = Settings.declared()
    for key, range_ in (
        ("bits", "0.1 to 16"),
        ("uplink_bits", "0.1 to 16"),
        ("downlink_bits", "0.1 to 16, or 32: not at all"),
    ):
        assert range_ in declared[key].about.help
        with pytest.raises(fb.UserError, match=f"{key} is a number from {range_}"):
            declared[key].read(key, "none")
    assert "--uplink-bits" in declared["bits"].about.help


def test_documents_state_the_range_of_bits():
    codec, lossy, commands = ((DOCS / name).read_text("utf-8") for name in ("codec.md", "lossy.md", "command-line.md"))
    assert f"`bits` may be {RANGE}, as in runs (`fewbytes run --bits`)" in codec
    assert f"{RANGE} bits are allowed, as in [the codec alone](codec.md)" in lossy.replace("\n", " ")
    assert f"to about this number of bits, from {RANGE};" in commands


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"evaluate_evry": 2}, "there is no setting 'evaluate_evry' .did you mean 'evaluate_every'"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"engine": "flower-deployment"}, "fewbytes deploy"),
        ({"ray_address": "auto"}, "ray_address is for engine flower-simulation, not local"),
        ({"seed": 1}, r"^a run has no setting 'seed': it belongs to the task, fb.Task.of\(…, seed=1\)$"),
        ({"metrics": ["f1"]}, r"'metrics': it belongs to the task, fb.Task.of\(…, metrics=…\)$"),
        ({"lr": 0.1}, r"^a run has no setting 'lr': it belongs to the method, FedAvg\(lr=0.1\)$"),
        ({"local": fb.Local()}, r"'local': it belongs to the method, FedAvg\(local=…\)$"),
        ({"mu": 0.1}, "there is no setting 'mu'$"),
        ({"min_replies": 1}, r"it belongs to fb.run\(…, policy=fb.Policy\(min_replies=1\)\)$"),
        ({"clients": 5}, r"it belongs to fewbytes.data.Partition\(clients=5\)$"),
    ],
)
def test_run_refuses_arguments_that_cannot_be(given, says, tmp_path):
    with pytest.raises(fb.UserError, match=says):
        fb.run(fb.FedAvg(), tiny_task(), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("of", [True, False])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sed": 3}, r"^a task has no option 'sed' \(did you mean 'seed'\?\)$"),
        ({"rounds": 3}, r"^a task has no option 'rounds': it belongs to fb.run\(…, rounds=3\)$"),
        ({"out": "x"}, r"it belongs to fb.run\(…, out='x'\)$"),
        ({"lr": 0.1}, r"it belongs to the method, as in FedAvg\(lr=0.1\)$"),
        ({"build": TinyNet}, "^a task has no option 'build'"),
        ({"nonsense": 3}, "^a task has no option 'nonsense'$"),
    ],
)
def test_a_task_refuses_options_that_it_has_not(of, given, says):
    data = tiny_data(1)
    with pytest.raises(fb.UserError, match=says):
        fb.Task.of(TinyNet, [(pair.train, pair.test) for pair in data.clients], **given) if of else fb.Task.on(
            data, TinyNet, **given
        )


def test_each_way_to_make_a_task_names_the_other_for_options_of_that():
    with pytest.raises(fb.UserError, match=r"'loss': it belongs to objective=objective_for\(data.learns, loss=…\) of"):
        fb.Task.on(tiny_data(1), TinyNet, loss=len)
    with pytest.raises(fb.UserError, match=r"'objective': it belongs to fb.Task.on\(…, objective=…\)$"):
        fb.Task.of(TinyNet, [], objective=tiny_task().problem.objective)


def test_a_method_names_where_an_option_belongs_that_it_has_not():
    for given, says in (({"rounds": 3}, r"fb.run\(…, rounds=3\)"), ({"seed": 3}, r"the task, fb.Task.of\(…, seed=3\)")):
        with pytest.raises(TypeError, match=rf"^FedAvg has no parameter '{next(iter(given))}': it belongs to {says}$"):
            fb.FedAvg(**given)


def test_text_stands_for_settings_of_several_parts():
    given = {"samples": "50/10", "newcomers": 2, "known_classes": "0, 4", "budget": "1.5GB", "class_names": '["a"]'}
    experiment = make_experiment(METHOD | given)
    assert (experiment.partition.samples, experiment.partition.known_classes) == ((50, 10), [0, 4])
    assert (experiment.run.budget, experiment.data.class_names) == (1_500_000_000, ["a"])


def test_groups_are_checked_where_they_are_made():
    for made, wrong in ((Settings, {"rounds": 1.5}), (Partition, {"clients": 0}), (fb.Policy, {"min_replies": 2})):
        with pytest.raises(fb.UserError, match=next(iter(wrong))):
            made(**wrong)


def test_a_config_may_name_any_setting_and_no_other(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(msgspec.toml.encode({"method": "fedavg", "fraction": 0.5, "alhpa": 1}))
    with pytest.raises(fb.UserError, match=r"unknown key 'alhpa' \(did you mean 'alpha'\?\)"):
        read_experiment(path)
