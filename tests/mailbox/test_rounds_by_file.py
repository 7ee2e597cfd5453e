"""Rounds that are carried as files: results as on one machine, whatever happens to the files on their way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from carried import Federation, assert_as_on_one_machine

from fewbytes.base.chain import verify
from fewbytes.base.errors import UserError
from fewbytes.base.files import lock, private_folder
from fewbytes.federation import members
from fewbytes.mailbox import server
from fewbytes.mailbox.keys import member_key, node_key, server_keys
from fewbytes.mailbox.sealed import read_header, seal


def said(federation, *words):
    return [line for line in federation.lines if all(word in line for word in words)]


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def on_first(federation, name, kind, act, when=lambda path: True):
    """A function that lets something happen to the first such file, once."""
    left = [act]

    def call():
        for path in federation.files(name, kind):
            if left and when(path):
                left.pop()(path)

    return call


def all_of(*functions):
    return lambda: [each() for each in functions]


def number(path: Path) -> int:
    return read_header(path.read_bytes()).number


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


def test_two_rounds_are_equal_to_the_local_engines_to_the_bit(federation):
    carried = federation.run()
    assert_as_on_one_machine(federation, carried)
    assert not said(federation, "refused")
    assert not federation.files("north", "inbox") + federation.files("north", "outbox")  # nothing is left over
    lines, fault = verify(federation.folder / "north" / "runs" / ".egress" / "node")
    assert fault is None
    left = [line for line in lines if "handler" in line]
    assert [(line["round"], line["handler"]) for line in left] == [(0, ":data"), (1, "train"), (2, "train")]


def test_a_method_with_states_of_its_own_and_messages_that_wait(federation):
    carried = federation.run(method="scaffold", rounds=3)
    assert_as_on_one_machine(federation, carried, method="scaffold", rounds=3)


def test_lost_doubled_changed_and_old_files_change_nothing(federation, monkeypatch):
    """Each is noticed in one line, and what is lost is sent again."""
    monkeypatch.setattr(server, "AGAIN_SECONDS", 0.0)
    old = federation.folder / "old"

    def double(path):
        shutil.copy(path, path.with_name(f"copy of {path.name}"))

    def changed_copy(path):
        shutil.copy(path, path.with_name("changed.order"))
        flipped(path.with_name("changed.order"), -5)

    federation.before = all_of(
        on_first(federation, "west", "inbox", lambda path: shutil.copy(path, old)),
        on_first(
            federation, "west", "inbox", lambda path: shutil.copy(old, path.with_name("week-old.order")),
            when=lambda path: number(path) > number(old),
        ),
        on_first(federation, "north", "inbox", Path.unlink),
        on_first(federation, "west", "inbox", double),
        on_first(federation, "south", "inbox", changed_copy),
    )  # fmt: skip
    federation.after = all_of(
        on_first(federation, "south", "outbox", Path.unlink),
        on_first(federation, "west", "outbox", double),
        on_first(federation, "north", "outbox", lambda path: flipped(path, -5)),
    )
    carried = federation.run(rounds=3)
    assert_as_on_one_machine(federation, carried, rounds=3)
    assert len(said(federation, "changed.order is refused", "not signed with the key of server, or was changed")) >= 1
    assert len(said(federation, "north/outbox", "is refused", "not signed with the key of north, or was changed")) == 1
    assert len(said(federation, "west/outbox/", "is over: the file came late, or twice")) >= 1
    assert len(said(federation, "week-old.order is refused", "is old: this site has carried out number")) >= 1
    for name in federation.names:  # no training was done twice
        lines, fault = verify(federation.folder / name / "runs" / ".egress" / "node")
        assert fault is None
        digests = {(line["round"], line["digest"]) for line in lines if line.get("handler") == "train"}
        assert len(digests) == 3


def test_an_answer_that_is_cut_short_is_made_again(federation):
    """As by a job that was killed, or a disk that was pulled out."""

    def cut(path):
        path.write_bytes(path.read_bytes()[:300])

    federation.after = on_first(federation, "south", "outbox", cut)
    carried = federation.run()
    assert_as_on_one_machine(federation, carried)


def test_the_name_of_a_run_folder_may_have_spaces_and_any_letters(federation):
    def nothing_refused():
        assert not said(federation, "refused")

    federation.after = nothing_refused
    assert_as_on_one_machine(federation, federation.run(out="_Läufe's 1. (neu)"))


def test_a_job_without_its_inbox_says_so(federation):
    with pytest.raises(UserError, match=r"there is no inbox .*not-mounted"):
        federation.work("north", federation.folder / "not-mounted")


def test_a_run_that_is_interrupted_resumes_without_another_trip(federation):
    """Orders stay for the resumed run, which takes the answers that came meanwhile, and asks for no numbers again."""

    def interrupt(path):
        raise KeyboardInterrupt

    federation.after = on_first(federation, "west", "outbox", interrupt, when=lambda path: number(path) > 6)
    with pytest.raises(KeyboardInterrupt):
        federation.run(rounds=3)
    assert all(federation.files(name, "outbox") for name in federation.names)
    federation.after = lambda: None
    carried = federation.run(resume=True, rounds=3)
    assert_as_on_one_machine(federation, carried, rounds=3)
    assert not said(federation, "is over")
    for name in federation.names:  # each was asked once for its numbers, and thrice to train
        lines, fault = verify(federation.folder / name / "runs" / ".egress" / "node")
        assert fault is None
        left = [(line["round"], line["handler"]) for line in lines if "handler" in line]
        assert left == [(0, ":data"), (1, "train"), (2, "train"), (3, "train")]
    assert not federation.files("north", "inbox") + federation.files("north", "outbox")


def test_a_newcomer_by_files_joins_in_the_middle(federation):
    settings = {"clients": 2, "newcomers": 1, "arrival": 2, "rounds": 3}
    carried = federation.run(**settings)
    assert_as_on_one_machine(federation, carried, **settings)
    lines, _ = verify(federation.folder / "west" / "runs" / ".egress" / "node")
    assert [line["round"] for line in lines if line.get("handler") == "train"] == [2, 3]


def test_a_member_that_is_invited_while_the_run_goes_on_takes_the_free_place(tmp_path):
    federation = Federation(tmp_path, ("north", "south"))

    def joined(path):
        federation.add("west")

    federation.after = on_first(federation, "south", "outbox", joined, when=lambda path: number(path) > 2)
    settings = {"clients": 2, "newcomers": 1, "arrival": 2, "rounds": 3}
    carried = federation.run(**settings)
    lines, _ = verify(federation.folder / "west" / "runs" / ".egress" / "node")
    assert [line["round"] for line in lines if line.get("handler") == "train"] == [2, 3]
    assert_as_on_one_machine(federation, carried, **settings)


def test_orders_of_a_run_that_goes_back_are_withdrawn(federation):
    """And answers to them are ignored."""

    def interrupt(path):
        raise KeyboardInterrupt

    federation.after = on_first(federation, "west", "outbox", interrupt, when=lambda path: number(path) > 9)
    with pytest.raises(KeyboardInterrupt):
        federation.run(rounds=3, parameters={"batch": 40, "received": True})
    federation.after = lambda: None
    carried = federation.run(resume=True, from_round=1, rounds=3, parameters={"batch": 40, "received": True})
    assert_as_on_one_machine(federation, carried, rounds=3, parameters={"batch": 40, "received": True})
    assert said(federation, "is over: the file came late, or twice")
    assert not federation.files("north", "inbox")


def test_an_answer_signed_by_another_member_is_refused(federation):
    def forge(path):
        south = node_key(federation.folder / "south" / "keys" / "south")
        server_key = server_keys(federation.home / "certificates")[0].public_key()
        path.write_bytes(seal(read_header(path.read_bytes()), b"forged", south, server_key))

    federation.after = on_first(federation, "north", "outbox", forge)
    assert_as_on_one_machine(federation, federation.run())
    assert len(said(federation, "north/outbox", "is refused: it is not signed with the key of north")) == 1
    assert federation.files("north", "outbox")[0].suffix == ".refused"


def test_an_order_of_another_server_or_for_another_site_is_refused(federation, tmp_path):
    other = Federation(tmp_path / "other", ("north",))

    def forge(path):
        key, certificates = server_keys(other.home / "certificates")
        header = msgspec.structs.replace(read_header(path.read_bytes()), certificates=certificates)
        north = member_key(members.read(federation.home).member("north").key)
        path.with_name("forged.order").write_bytes(seal(header, b"forged", key, north))
        shutil.copy(path, federation.box / "south" / "inbox" / "astray.order")

    federation.before = on_first(federation, "north", "inbox", forge)
    assert_as_on_one_machine(federation, federation.run())
    assert said(federation, "forged.order is refused: its certificate is none that ca.crt accepts")
    assert said(federation, "astray.order is refused: it is the order to north, and this is south")


def test_a_sites_policy_declines_as_online(federation):
    with open(federation.folder / "south" / "node.toml", "a") as file:
        file.write("max-rounds = 1\n")
    rows = [json.loads(line) for line in (federation.run() / "rounds.jsonl").read_text().splitlines()]
    [left_out] = rows[-1]["left_out"]
    assert left_out["client"] == 1
    assert "its site declines: all its 1 rounds are answered" in left_out["why"]


def test_a_removed_member_is_not_asked_and_not_waited_for(federation):
    members.remove(federation.home, "west")
    run = federation.run(min_replies=1.0)
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [(row["cohort"], row.get("left_out", [])) for row in rows if row["phase"] == "round"] == [(2, []), (2, [])]


def test_a_member_that_is_removed_while_it_is_asked_is_not_waited_for(federation):
    """And what it answers is not taken."""
    remove = lambda path: members.remove(federation.home, "west")  # noqa: E731
    federation.after = on_first(federation, "west", "outbox", remove, when=lambda path: number(path) > 3)
    rows = [json.loads(line) for line in (federation.run() / "rounds.jsonl").read_text().splitlines()]
    assert [[each["client"] for each in row["left_out"]] for row in rows] == [[2], [2]]
    assert [row["left_out"][0]["outcome"] for row in rows] == ["unreachable", "excluded"]


def test_two_jobs_of_a_node_do_not_work_at_the_same_time(federation):
    folder = federation.folder / "north" / "runs" / ".mailbox"
    private_folder(folder.parent)
    private_folder(folder)
    with lock(folder / "lock"), pytest.raises(UserError, match="another job of this node is at work"):
        federation.work("north")
