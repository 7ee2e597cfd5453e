"""The page about what left: it states the record, its faults, the rules and the measured figures."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from commands import fewbytes
from torch import nn

import fewbytes as fb
from fewbytes.base.chain import Chain, make_key
from fewbytes.report.audit import _LEAKS, audited, records_in, write_audit

TEXT = "<script>alert(1)</script>"


def words_of(page):
    return " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page.read_text(), flags=re.S)).split())


def answer(t, **more):
    return {
        "time": f"2026-11-2{t}T08:00:00Z", "run": "lesions", "round": t, "handler": "train", "replies": True,
        "methods": ["fedavg"], "hidden": False, "order": f"{t:032}", "digest": "0" * 32,
        "fields": {"theta": ["conv.weight", "conv.bias"], "samples": []}, "beside": ["losses: train"],
        "bytes": 1000 + t,
        **more,
    }  # fmt: skip


@pytest.fixture
def record(tmp_path):
    def write(*entries):
        place = tmp_path / "nodes" / ".egress" / "3"
        chain = Chain(place, make_key(place / "key"))
        chain.news()
        for entry in entries:
            chain.append(entry)
        return place

    return write


def page_of(place):
    return write_audit([audited(place)], place / "page.html", "What left this site")


def test_the_page_states_what_left_what_is_learnt_from_it_and_what_is_forbidden(record):
    rules = ["At most 40 rounds are answered in all runs together."]
    place = record({"time": "2026-11-21T07:00:00Z", "rules": rules}, *map(answer, (1, 2, 4)))
    words = words_of(page_of(place))
    assert "The record is whole: its 4 lines are in order, unchanged, and signed by the node." in words
    assert "lesions train theta (conv.weight, conv.bias); samples; beside: losses: train 1, 2, 4 3 3,007" in words
    assert rules[0] in words
    assert "SHA256:" in words
    assert json.loads(_LEAKS.read_text())["fedavg"]["images"] in words
    assert "Nothing has left" not in words
    assert "secure aggregation" not in words


def test_a_site_without_rules_and_one_that_sent_nothing_are_said_to_be_so(record):
    words = words_of(page_of(record(answer(1))))
    assert "The site has set no rules" in words
    place = record()
    (place / "egress.jsonl").write_bytes(b"")
    (place / "egress.head").unlink()
    assert "Nothing has left." in words_of(page_of(place))


def test_a_page_says_which_line_was_changed_and_shows_those_before_it(record):
    place = record(*map(answer, (1, 2, 3)))
    path = place / "egress.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"bytes":1002', b'"bytes":1001'))
    words = words_of(page_of(place))
    assert "The record was changed, at line 2: it was changed: its hash is another." in words
    assert " 1 1 1,001 " in words


def test_protections_are_stated_where_every_reply_had_them(record):
    place = record(answer(1, hidden=True, epsilon=2.5), answer(2, hidden=True, epsilon=4.0))
    words = words_of(page_of(place))
    assert "All replies were under secure aggregation" in words
    assert "All runs together have spent epsilon 4 " in words
    record(answer(3))
    assert "All replies were under secure aggregation" not in words_of(page_of(place))


def test_of_many_runs_the_page_shows_the_last_and_counts_all(record):
    place = record(*(answer(1, run=f"run-{i}", bytes=1) for i in range(210)))
    words = words_of(page_of(place))
    assert "run-9 " not in words
    assert "run-10 " in words
    assert "all 210 210" in words
    assert "the last 200 of 210 rows" in words


def test_names_in_a_record_are_text_on_the_page(record):
    place = record(answer(1, run=TEXT, fields={TEXT: [TEXT]}, methods=[TEXT]))
    page = page_of(place).read_text()
    assert "<script" not in page
    assert page.count(html.escape(TEXT)) >= 4


def test_a_method_that_was_not_measured_is_said_to_be_none(record):
    assert "own:Method not measured not measured" in words_of(page_of(record(answer(1, methods=["own:Method"]))))


def test_a_signed_line_of_something_else_is_refused(record):
    with pytest.raises(fb.UserError, match="no node of this version wrote it"):
        audited(record({"anything": 1}))


def test_the_command_verifies_all_records_under_a_folder_and_names_the_line(record, tmp_path):
    place = record(*map(answer, (1, 2, 3)))
    assert records_in(tmp_path) == [place]
    done = fewbytes("audit", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Node 3: The record is whole: its 3 lines" in done.stdout
    path = place / "egress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    done = fewbytes("audit", str(tmp_path), "--out", str(tmp_path / "other.html"))
    assert done.returncode == 1
    assert "at line 2: it does not follow the line before it (it was written as line 3)" in done.stdout
    assert done.stderr.strip() == "fewbytes: changed: the record of Node 3"
    assert "was changed, at line 2" in words_of(tmp_path / "other.html")
    place.rename(place.with_name("node"))  # as of a member, whose number is the server's to choose
    done = fewbytes("audit", str(tmp_path), "--out", str(tmp_path / "other.html"))
    assert done.stderr.strip() == f"fewbytes: changed: the record of Node in {tmp_path / 'nodes'}"
    (tmp_path / "empty").mkdir()
    assert "has no egress.jsonl" in fewbytes("audit", str(tmp_path / "empty")).stderr


def test_a_statement_of_a_run_in_one_process_counts_what_its_clients_sent(tmp_path):
    x, y = torch.eye(4), torch.arange(4)
    task = fb.Task.of(lambda: nn.Linear(4, 4), [((x, y), (x, y))] * 3)
    result = fb.run(fb.FedAvg(), task, rounds=2, out=tmp_path / "run")
    done = fewbytes("statement", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    words = words_of(tmp_path / "run" / "statement.html")
    sent = result.ledger.totals()["uplink_bytes"]
    assert f"run train theta, samples 1, 2 6 {sent:,}" in words
    assert "computed from its ledger, which is not signed" in words
