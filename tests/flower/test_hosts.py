"""What a keeper does for nodes on other hosts, without any."""

from __future__ import annotations

import pytest

import fewbytes as fb
from fewbytes.base.errors import FrameError
from fewbytes.engines.frames import FrameFolder
from fewbytes.engines.store import ClientStore
from fewbytes.flower.cluster import Keeper
from fewbytes.wire import unpack


@pytest.fixture
def keeper(tmp_path):
    (tmp_path / "frames").mkdir()
    return Keeper(tmp_path, FrameFolder(tmp_path / "frames"))


@fb.payload
class Note:
    """What a client remembers."""

    text: str


def test_a_frame_that_comes_from_another_host_lies_among_the_servers(keeper):
    name = keeper.put(bytearray(b"a frame"))
    assert bytes(keeper.frames.get(name)) == b"a frame"
    keeper.frames.remove(name)
    with pytest.raises(FrameError, match="no longer exists"):
        keeper.get(name)


def test_a_clients_files_are_lent_and_kept_and_nobody_elses(keeper, tmp_path):
    store = ClientStore(tmp_path / "run" / "checkpoint" / "clients")
    for client in (1, 11):
        for version in (1, 2):
            store.save(Note(f"{client} {version}"), client, version)
    store.trained(1, bytes(32))
    lent = keeper.lend("run", 1, 2)
    folder = "checkpoint/clients"
    assert lent.keys() == {f"{folder}/{name}" for name in ("1-2.state", "1.trained", "secret")}
    assert lent[f"{folder}/secret"].tobytes() == store.secret()
    new = {f"{folder}/1-3.state": lent[f"{folder}/1-2.state"], "models/client-1.safetensors": b"a model"}
    keeper.keep("run", 1, new, range(2, 4))
    assert unpack(Note, store.parsed(1, 3), limit=100).text == "1 2"
    assert [store.path(1, version).exists() for version in (1, 2, 3)] == [False, True, True]
    assert unpack(Note, store.parsed(11, 1), limit=100).text == "11 1"
    assert (tmp_path / "run" / "models" / "client-1.safetensors").read_bytes() == b"a model"
