"""A federation's folder: keys made at the sites, invitations, requests, removal, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.experiments.membership import places_for
from fewbytes.federation import members
from fewbytes.federation.texts import Invitation, Request, fingerprint
from fewbytes.flower.certificates import write_node_key
from fewbytes.flower.own_certificates import check_certificates


@pytest.fixture
def folder(tmp_path) -> Path:
    """A federation that has invited north."""
    folder = tmp_path / "federation"
    members.make(folder, "server.example:9092", None)
    members.invite(folder, "north")
    return folder


def request(place: Path, name: str) -> Request:
    """A site's request with a key made there."""
    write_node_key(place, name)
    return Request.of(name, place / name)


def names(folder: Path) -> list[str]:
    return [each.name for each in members.read(folder).members]


def test_a_member_joins_by_its_own_key_gets_another_and_is_removed(folder, tmp_path):
    invitation = Invitation.read(members.invite(folder, "north").line())
    assert (invitation.name, invitation.superlink) == ("north", "server.example:9092")
    assert invitation.ca == (folder / "certificates" / "ca.crt").read_text()
    (tmp_path / "text").write_text(request(tmp_path / "a", "north").line() + "\n")
    first = Request.read(str(tmp_path / "text"))
    assert members.join(folder, first) == "joined"
    assert members.join(folder, first) == "unchanged"
    second = request(tmp_path / "b", "north")
    with pytest.raises(UserError, match="north is not invited"):  # anybody may send a request with that name
        members.join(folder, second)
    members.invite(folder, "north")
    assert members.join(folder, second) == "replaced"
    (member,) = members.read(folder).members
    assert member.key == second.key
    members.invite(folder, "north")
    with pytest.raises(UserError, match=r"key SHA256:\S+ of north was removed earlier"):
        members.join(folder, first)
    members.remove(folder, "north")
    assert names(folder) == []
    members.invite(folder, "north")
    with pytest.raises(UserError, match="was removed earlier"):
        members.join(folder, second)
    what = [line["what"] for line in members.history(folder)]
    assert what == ["made", "invited", "joined", "invited", "replaced", "invited", "removed", "invited"]
    assert members.history(folder)[4]["old"] == fingerprint(first.key)
    private = [(tmp_path / place / "north").read_bytes().splitlines()[1] for place in "ab"]
    assert not [p for p in folder.rglob("*") if p.is_file() and any(key in p.read_bytes() for key in private)]


def test_what_is_no_members_request_is_refused(folder, tmp_path):
    mine = request(tmp_path / "a", "north")
    members.join(folder, mine)
    members.invite(folder, "south")
    stolen = Request.of("south", tmp_path / "a" / "north")
    with pytest.raises(UserError, match="key of south is that of north"):
        members.join(folder, stolen)
    for changed in (msgspec.structs.replace(mine, name="south"), msgspec.structs.replace(mine, signature="")):
        with pytest.raises(UserError, match=r"request of \w+: the key that it names has not signed it"):
            members.join(folder, changed)
    with pytest.raises(UserError, match=r"sout is not a member.*members: north"):
        members.remove(folder, "sout")
    with pytest.raises(UserError, match=r"south1 is not invited \(did you mean 'south'\?\)"):
        members.join(folder, request(tmp_path / "c", "south1"))
    assert names(folder) == ["north"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line[:-9],
        lambda line: line.replace("request", "invitation"),
        lambda line: "",
        lambda line: "nonsense",
        lambda line: line[:40] + "!" + line[40:],
        lambda line: "fewbytes-request." + base64.urlsafe_b64encode(json.dumps({"name": "x"}).encode()).decode(),
    ],
)
def test_a_text_that_is_not_whole_is_refused_in_one_line(spoil, tmp_path):
    with pytest.raises(UserError, match="not the whole request that `fewbytes node init` prints") as raised:
        Request.read(spoil(request(tmp_path, "north").line()))
    assert "\n" not in str(raised.value)


def test_a_server_moves_and_renews(folder):
    ca, before = (
        (folder / "certificates" / "ca.crt").read_bytes(),
        (folder / "certificates" / "server.pem").read_bytes(),
    )
    members.renew_certificate(folder, None, None)
    assert (folder / "certificates" / "server.pem").read_bytes() != before
    members.renew_certificate(folder, "new.example:443", "10.0.0.5:9092")
    assert (folder / "certificates" / "ca.crt").read_bytes() == ca
    check_certificates(folder / "certificates", ["server.example", "new.example"])
    federation = members.read(folder)
    assert (federation.address, federation.listen) == ("new.example:443", "10.0.0.5:9092")


def test_a_folder_that_is_no_federation_is_named(tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of a federation \(it has no federation\.json\)"):
        members.invite(tmp_path, "north")
    assert not list(tmp_path.iterdir())
    members.make(tmp_path / "f", "server.example:9092", None)
    with pytest.raises(UserError, match="is a federation already"):
        members.make(tmp_path / "f", "server.example:9092", None)
    (tmp_path / "f" / "federation.json").write_text("{")
    with pytest.raises(UserError, match=r"federation\.json cannot be read"):
        members.read(tmp_path / "f")


def test_a_run_of_some_members(folder, tmp_path):
    for name in ("north", "south", "west"):
        if name != "north":
            members.invite(folder, name)
        members.join(folder, request(tmp_path, name))
    federation = members.read(folder)
    assert places_for(federation, 1) == ["north", "south", "west", "newcomer-1"]
    assert places_for(federation, 0, ["north", "west"]) == ["north", "west"]
    with pytest.raises(UserError, match=r"nort is no member of the federation \(did you mean 'north'\?\)"):
        places_for(federation, 0, ["nort"])
