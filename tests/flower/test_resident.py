"""What a resident node is told to be, and what it says of what it cannot be."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import httpx
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import fewbytes as fb
from fewbytes.engines.handlers import Done
from fewbytes.experiments import app
from fewbytes.flower.apps import failure
from fewbytes.flower.certificates import write_certificates, write_node_key
from fewbytes.flower.fleet import Fleet, Stopped
from fewbytes.flower.messages import write_content
from fewbytes.flower.node_file import NodeFile, name_server
from fewbytes.flower.resident import _follow, serve
from fewbytes.running.node_status import NodeWatch

ABOUT = NodeFile("127.0.0.1:1", "certificates/ca.crt", "keys/a", {"partition-id": 0, "tell": "sizes"})


@pytest.fixture
def folder(tmp_path) -> Path:
    """A node's folder, with its key and the certificate of a SuperLink that is not there."""
    write_certificates(tmp_path / "certificates", ["127.0.0.1"])
    write_node_key(tmp_path / "keys", "a")
    (tmp_path / "node.toml").write_text(ABOUT.text())
    return tmp_path


def fleet(folder: Path, said: list[str] | None = None, stop: threading.Event | None = None) -> Fleet:
    say = [].append if said is None else said.append
    key = folder / ABOUT.key
    return Fleet(
        ABOUT.superlink, folder / ABOUT.ca, key, say, NodeWatch("north", ABOUT.superlink), stop or threading.Event()
    )


def test_a_nodes_file_is_read_as_it_was_written(folder):
    assert NodeFile.read(folder / "node.toml") == ABOUT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("superlink", "link"), "unknown field `link`|missing required field `superlink`"),
        (lambda text: text.replace("[config]", "[configuration]"), "`config"),
        (lambda text: text.replace("127.0.0.1:1", "server"), "'server': expected host:port"),
        (lambda text: text.replace("127.0.0.1:1", "https://server:1"), "'https://server:1': expected host:port"),
        (lambda text: text.replace('"keys/a"', "7"), r"Expected `str`, got `int` - at `\$.key`"),
        (lambda text: text.replace("partition-id = 0", "partition-id = [0]"), "got `array`"),
        (lambda text: text[:-3], "Invalid|Unterminated|Expected|Unclosed|TOML"),
        (lambda text: "\udcff", None),
    ],
)
def test_what_is_wrong_with_a_nodes_file_is_told_in_one_line(change, words, folder):
    path = folder / "node.toml"
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(fb.UserError, match=words) as told:
        NodeFile.read(path)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_nodes_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(fb.UserError, match=r"none\.toml: .*no such file"):
        NodeFile.read(tmp_path / "none.toml")


def key_of(kind: str) -> bytes:
    if kind == "other":
        return ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return {"damaged": b"-----BEGIN OPENSSH PRIVATE KEY-----\nxx\n-----END OPENSSH PRIVATE KEY-----\n", "empty": b""}[
        kind
    ]


@pytest.mark.parametrize("kind", ["other", "damaged", "empty", "none"])
def test_a_key_that_is_none_is_named(kind, folder):
    path = folder / "keys" / "a"
    path.unlink() if kind == "none" else path.write_bytes(key_of(kind))
    with pytest.raises(fb.UserError, match=r"keys/a: .*private key") as told:
        fleet(folder)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["", "nonsense", "\udcff", None])
def test_a_certificate_that_is_none_is_named(text, folder):
    path = folder / "certificates" / "ca.crt"
    path.unlink() if text is None else path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(fb.UserError, match=r"ca\.crt: .*certificate") as told:
        fleet(folder)
    assert "\n" not in str(told.value)


def test_a_node_waits_for_a_superlink_that_is_not_there_and_says_so_once(folder):
    said, stop = list[str](), threading.Event()
    threading.Timer(3, stop.set).start()
    with pytest.raises(Stopped):
        fleet(folder, said, stop).connect()
    (line,) = said
    assert line.startswith("waiting: the SuperLink at 127.0.0.1:1 does not answer (ConnectError: ")


def test_a_node_keeps_the_data_of_one_run(monkeypatch):
    monkeypatch.setattr(app, "_served", {})
    config = {"method": "fedavg", "dataset": "digits", "clients": 2, "rounds": 1, "parameters.epochs": 1}
    first = [app.serve_client(config | {"out": out}, {"partition-id": 0}) for out in ("a", "b")]
    assert first[0] is first[1]
    other = app.serve_client(config | {"parameters.epochs": 2}, {"partition-id": 0})
    assert list(app._served.values()) == [other]


@pytest.mark.parametrize("me", ["'x'", "-1"])
def test_whose_data_a_node_has_is_a_number(me, tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(f'superlink = "127.0.0.1:1"\nca = "ca"\nkey = "key"\n[config]\npartition-id = {me}\n')
    with pytest.raises(fb.UserError, match=r"partition-id .*expected"):
        NodeFile.read(path)


def test_what_a_file_names_lies_beside_it(tmp_path):
    (tmp_path / "scans").mkdir()
    config = {"partition-id": 0, "folder": "runs", "client-data": "scans"}
    placed = NodeFile("127.0.0.1:1", "ca.crt", "keys/a", config).placed(tmp_path)
    assert (placed.ca, placed.key) == (str(tmp_path / "ca.crt"), str(tmp_path / "keys" / "a"))
    assert placed.config == config | {"folder": str(tmp_path / "runs"), "client-data": str(tmp_path / "scans")}
    elsewhere = NodeFile("127.0.0.1:1", "ca.crt", "a", config | {"client-data": "hospital.data:load"}).placed(tmp_path)
    assert elsewhere.config["client-data"] == "hospital.data:load"


def test_each_reason_to_wait_is_told_once_until_the_superlink_answers(folder, monkeypatch):
    said, reasons = list[str](), iter(["refused", "refused", "certificate expired", "refused", None, "refused", None])
    here = fleet(folder, said)
    monkeypatch.setattr(here, "wait", lambda seconds: None)
    monkeypatch.setattr("fewbytes.flower.fleet.SLOWEST", 0.0)  # said at once

    def call() -> str:
        if (why := next(reasons)) is not None:
            raise httpx.ConnectError(why)
        return "an answer"

    here._answered = True
    for _ in range(2):
        assert here._ask(call) == "an answer"
    assert [re.search(r"refused|no longer matches ca .*expired|restored", line)[0][:16] for line in said] == [
        "refused", "no longer matches"[:16], "restored", "refused", "restored",
    ]  # fmt: skip


def test_a_node_whose_folder_is_not_writable_says_so_before_it_connects(folder):
    (folder / "file").write_text("")
    config = {"partition-id": 0, "folder": str(folder / "file" / "runs")}
    (folder / "node.toml").write_text(NodeFile(ABOUT.superlink, ABOUT.ca, ABOUT.key, config).text())
    with pytest.raises(fb.UserError, match=r"file/runs: cannot write there: Not a directory"):
        serve([(folder / "node.toml", NodeWatch("a", ABOUT.superlink))], app.client)


def test_a_node_follows_its_server_and_its_file_keeps_what_the_site_wrote(folder):
    path, said = folder / "node.toml", list[str]()
    path.write_text(path.read_text() + "# the ethics board asked for this\nmin-samples = 100\n")
    here = fleet(folder, said)
    with pytest.raises(fb.UserError, match="'server': expected host:port"):
        name_server(path, "server")
    _follow(here, path)
    assert not said
    before = path.read_text()
    name_server(path, "[::1]:2")
    assert path.read_text() == before.replace("127.0.0.1:1", "[::1]:2")
    _follow(here, path)
    _follow(here, path)
    assert here.superlink == "[::1]:2"
    assert said == ["the server has moved to [::1]:2, as this node's file says"]
    path.write_text("half a fi")  # somebody edits it
    _follow(here, path)
    assert here.superlink == "[::1]:2"


def test_a_failed_order_is_no_success(tmp_path):
    """In a node's log: what the server reads as an error."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # what Flower's own processes set
    asked = Message(RecordDict(), 1, "train.handler")
    asked.metadata.__dict__["_message_id"] = "m"

    def replied(done: Done) -> Message:
        return Message(write_content(msgspec.msgpack.encode(done)), reply_to=asked)

    assert failure(replied(Done(1, error="Read-only file system"))) == "Read-only file system"
    assert failure(replied(Done(1))) == ""
    assert "differs from the server" in failure(replied(Done(1, error='different:{"seed": "1"}')))
    assert failure(Message(Error(2, "it broke"), reply_to=asked)) == "it broke"
    assert failure(Message(write_content(msgspec.msgpack.encode(3)), reply_to=asked)) == ""
