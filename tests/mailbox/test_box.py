"""What lies in a mailbox that others can write to, and what the options of rounds by files refuse."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from carried import Federation
from commands import fewbytes

from fewbytes.base.errors import UserError
from fewbytes.mailbox import box
from fewbytes.mailbox.box import Box
from fewbytes.mailbox.sealed import NotAccepted


def test_links_pipes_and_large_files_are_not_read(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(b"secret")
    os.symlink(tmp_path / "secret", tmp_path / "link.answer")
    os.mkfifo(tmp_path / "pipe.answer")
    for name in ("link.answer", "pipe.answer"):
        with pytest.raises(NotAccepted, match="it is a link, a pipe or a device"):
            Box(str(tmp_path)).read(name)
    monkeypatch.setattr(box, "LARGEST", 5)
    with pytest.raises(NotAccepted, match="more than 5 bytes"):
        Box(str(tmp_path)).read("secret")


def test_a_link_in_place_of_a_file_is_replaced_and_what_it_names_is_not_written(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    os.symlink(tmp_path / "mine", tmp_path / "1.order")
    Box(str(tmp_path)).write("1.order", b"order")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert (tmp_path / "1.order").read_bytes() == b"order"


def test_an_object_store_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"s3://rounds needs s3fs: pip install 'fewbytes\[mailbox\]'"):
        Box("s3://rounds")


def test_a_planted_pipe_does_not_stop_a_run(tmp_path):
    federation, planted = Federation(tmp_path, ("north", "south")), []

    def plant():
        if not planted:
            planted.append(federation.box / "south" / "outbox" / "a.answer")
            os.mkfifo(planted[0])

    federation.after = plant
    federation.run(rounds=1)
    assert [line for line in federation.lines if "a.answer is refused: it is a link, a pipe or a device" in line]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mailbox", "box"), "--mailbox needs --federation DIR"),
        (("--federation", "federation", "--by-mailbox", "north"), "--by-mailbox needs --mailbox PLACE"),
        (("--federation", "federation", "--mailbox", "box", "--by-mailbox", "nord"), "'nord', which is not a member"),
        (("--federation", "federation", "--mailbox", "box", "--print"), "no program is started for members"),
        (("--federation", "federation", "--mailbox", "what://box"), "what://box is not a place for files"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_line(tmp_path, options, words):
    Federation(tmp_path, ("north", "south"))
    ended = fewbytes("deploy", "fedavg", "--dataset", "digits", *options, cwd=tmp_path)
    assert ended.returncode == 2
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_a_job_needs_a_members_node(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.order").write_bytes(b"x")
    ended = fewbytes("node", "--once", "in", "out", cwd=tmp_path)
    assert ended.returncode == 2
    assert "node.toml does not exist: name the node's file" in " ".join(ended.stderr.split())
    (tmp_path / "node.toml").write_text('superlink = "a:9"\nca = "ca.crt"\nkey = "key"\n[config]\npartition-id = 1\n')
    ended = fewbytes("node", "--once", "in", "out", cwd=tmp_path)
    assert ended.returncode == 2
    assert "names no member" in ended.stderr
