"""Settings are declared once: files, Flower's run config, options and Python's arguments all follow."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from cases import TinyNet, tiny_data, tiny_task
from typer.testing import CliRunner

import fewbytes as fb
from fewbytes.cli.app import app
from fewbytes.data import Partition
from fewbytes.experiments.app import read_run_config
from fewbytes.experiments.groups import DECLARED, GROUPS
from fewbytes.experiments.settings import make_experiment, read_experiment
from fewbytes.running.settings import Settings

OTHER: dict[str, Any] = {
    "dataset": "cells", "image_size": 32, "masks": True, "part": 0.5, "public": "cifar10", "augment": "crop-flip",
    "backdoor": 2, "target": ["y", "z"], "missing": "drop", "group": "patient", "uncertain": "one",
    "leave_out": ["id"], "columns": ["x", "y z"], "missing_marks": ["NA", "-999"], "limits": "half", "decimal": "comma",
    "categories": ["k"],
    "date_order": "day-first", "encoding": "utf-16", "separator": ";", "sheet": "north",
    "text": "words", "length": 64, "tokenizer": "cut",
    "schema": {"target": ["y"], "learns": "numbers", "numbers": {"y": [0.5, 2.0]}},
    "client_data": "sites", "class_names": ["a b", 'c", d'], "partition": "shards", "clients": 7, "alpha": 0.25,
    "classes_per_client": 3, "shards_per_client": 4, "main_share": 0.9, "shots": 5, "samples": [50, 10],
    "test": "held-classes", "partition_options": {"min_samples": 3},
    "newcomers": 2, "arrival": 3, "newcomers_a_round": 1, "stay": True, "known_classes": [0, 4],
    "newcomer_classes": [1], "metrics": ["f1", "auc"], "class_weights": "1,2", "model": "mlp", "lora": "rank=4",
    "weights": "w.pt", "normalise": "imagenet", "kgf": 4, "clusters": 3, "seed": 5, "precision": "bf16",
    "secure_aggregation": True, "secure_range": 8.0,
    "device": "cuda", "recalibrate": True, "rounds": 6, "budget": 10**9, "stop_when": "f1/global>=0.5",
    "aggregate": "trimmed-mean=0.1", "dp": "of=samples,epsilon=8,delta=1e-05,clip=0.5,noise=seeded",
    "engine": "flower-simulation", "workers": 2, "ray_address": "auto",
    "evaluate_every": 2, "coding": False, "keep_frames": True, "keep_checkpoints": 5,
    "save_models": False, "min_replies": 0.75, "round_timeout": 9.0, "over_selection": 0.5,
    "connect_timeout": 8.0,
    "retries": 2,
    "max_norm": 1e4,
    "strikes": 4,
    "exclude": "3,7",
    "speeds": "1,2.5,10",
}  # fmt: skip
"""Every setting at another value than its default, but for those of which each excludes others."""
ROUNDED: dict[str, dict[str, Any]] = {
    "uplink_bits": {"uplink_bits": 0.5, "coding": True},
    "uplink_step": {"uplink_step": 0.25, "coding": True},
    "downlink_bits": {"downlink_bits": 2.0, "coding": True},
}
METHOD: dict[str, Any] = {"method": "fedavg", "parameters": {"batch": 20}}


def test_every_setting_is_tried_here():
    assert OTHER.keys() | ROUNDED.keys() == DECLARED.keys()


@pytest.mark.parametrize("more", [{}, *ROUNDED.values()])
def test_every_setting_survives_a_config_file_and_flowers_run_config(more, tmp_path):
    experiment = make_experiment(METHOD | OTHER | more)
    (tmp_path / "config.toml").write_text(experiment.toml())
    assert make_experiment(read_experiment(tmp_path / "config.toml")).settings() == experiment.settings()
    assert experiment.settings().keys() == {"method", "parameters", *OTHER, *more}

    def flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:  # as Flower hands it to an app
        pairs: dict[str, Any] = {}
        for key, value in table.items():
            pairs |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
        return pairs

    config = flat(experiment.run_config())
    assert {type(value) for value in config.values()} <= {str, int, float, bool}
    assert make_experiment(read_run_config(config)).settings() == experiment.settings()


def test_brief_settings_are_named_only_where_they_are_not_the_default():
    plain = make_experiment(METHOD).settings()
    assert not {key for key, each in DECLARED.items() if each.about.brief} & plain.keys()
    assert {"alpha", "rounds", "coding", "min_replies"} <= plain.keys()
    assert make_experiment(METHOD | {"newcomers": 1, "arrival": 4}).settings()["arrival"] == 4


def test_help_groups_the_options_and_shows_their_defaults():
    text = CliRunner().invoke(app, ["run", "--help"]).output
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
        ({"uplink_bits": 0.1}, "uplink_bits is a number from 0.3 to 8"),
        ({"downlink_bits": 9.0}, "downlink_bits must be in [0.3, 8], not 9.0"),
        ({"uplink_bits": 0.5, "uplink_step": 1.0}, "uplink_bits and uplink_step say the same in two ways"),
        ({"uplink_step": 1.0, "coding": False}, "what is rounded is coded"),
        ({"method": None}, "name a method"),
    ],
)
def test_what_a_setting_cannot_be_is_said_in_one_line(given, says):
    with pytest.raises(fb.UserError) as error:
        make_experiment(METHOD | given)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


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
