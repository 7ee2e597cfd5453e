"""A dry run at a node: it trains, says what would leave and what the policy says of it, and sends nothing."""

from __future__ import annotations

import re

import pytest
from commands import fewbytes

pytest.importorskip("flwr", reason="Flower is not installed")

NODE = 'superlink = "127.0.0.1:9"\nca = "ca.crt"\nkey = "key"\n[config]\npartition-id = 1\n'
RUN = ("run", "fedavg", "--dataset", "digits", "--clients", "3", "--rounds", "1", "--set", "batch=40")


@pytest.fixture
def config(tmp_path):
    done = fewbytes(*RUN, "--keep-frames", "--out", "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    return run / "config.toml"


def dry(tmp_path, config, rules=""):
    (tmp_path / "node.toml").write_text(NODE + rules)
    before = set(tmp_path.rglob("*"))
    done = fewbytes("node", "node.toml", "--dry-run", config, cwd=tmp_path)
    assert set(tmp_path.rglob("*")) == before
    return done


def test_it_says_what_would_leave_to_the_byte_and_what_the_policy_says(config, tmp_path):
    done = dry(tmp_path, config)
    assert done.returncode == 0, done.stderr
    sent = (config.parent / "frames" / "1-train-1-up.frame").stat().st_size
    assert f"round 1, train: {sent:,} bytes" in done.stdout
    assert re.search(r"  theta: .*entries of the model", done.stdout)
    assert "the site's policy allows it" in done.stdout
    over = dry(tmp_path, config, f"max-bytes-a-round = {sent - 1}\n").stdout
    assert f"the site declines: its answer has {sent:,} bytes, more than {sent - 1:,} (max-bytes-a-round)" in over
    asks = dry(tmp_path, config, f'ask = true\nmax-bytes-a-round = {sent}\nmethods = "fedavg, clustered"\n').stdout
    assert "the site's policy allows it, once a person there approves the run (ask)" in asks
    assert "counts for max-bytes-a-round, too" in asks
    secure = dry(tmp_path, config, 'require = "secure-aggregation"\n').stdout
    assert "the site declines: it takes part only under secure aggregation" in secure


def test_under_secure_aggregation_it_says_what_is_summed(config, tmp_path):
    config.write_text("secure_aggregation = true\n" + re.sub("secure_aggregation = .*\n", "", config.read_text()))
    done = dry(tmp_path, config, 'require = "secure-aggregation"\n')
    assert done.returncode == 0, done.stderr
    assert "the site's policy allows it" in done.stdout
    assert "the server would see only the sum" in done.stdout


def test_a_member_of_a_federation_is_the_first_client(config, tmp_path):
    (tmp_path / "member.toml").write_text(NODE.replace("partition-id = 1", 'member = "north"'))
    done = fewbytes("node", "member.toml", "--dry-run", config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sent = (config.parent / "frames" / "1-train-0-up.frame").stat().st_size
    assert f"round 1, train: {sent:,} bytes" in done.stdout


def test_a_node_that_does_not_say_whose_data_it_has_and_a_misspelt_rule_are_refused(config, tmp_path):
    (tmp_path / "other.toml").write_text(NODE.replace("partition-id = 1\n", ""))
    done = fewbytes("node", "other.toml", "--dry-run", config, cwd=tmp_path)
    assert done.returncode == 2
    assert "set partition-id" in done.stderr
    done = dry(tmp_path, config, "max-round = 3\n")
    assert done.returncode == 2
    assert "unknown key 'max-round' (did you mean 'max-rounds'?)" in done.stderr
    done = dry(tmp_path, config, 'methods = "fedprox, fedvag"\n')
    assert "methods names 'fedvag', which is no method here (did you mean 'fedavg'?)" in done.stderr
