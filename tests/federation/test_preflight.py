"""`fewbytes check` names what is broken at a site, or a server, in one line: real sockets, certificates and files."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from broken import answering, change, closed_port, dropping, greeting, listening, relaying, silent, site, with_tls
from commands import fewbytes
from pki import Authority, own, pem

from fewbytes.federation import members

for name in ("experiments.deploy", "experiments.site_data", "federation.server_preflight"):
    importlib.import_module(f"fewbytes.{name}")  # once, and not in every command
ORDER = ("node.toml", "key", "CA", "proxy", "name", "port", "TLS", "clock", "membership", "versions", "1 MB", "data",
         "disk", "folder")  # fmt: skip
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def checked(*command: str | Path, **environment: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and the state and words of each line."""
    done = fewbytes("check", *command, "--json", "--timeout", "1", env=environment)
    assert not done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert all("\n" not in line["words"] for line in found)
    return done.returncode, {line["about"]: (line["state"], line["words"]) for line in found}


def only_wrong(about: str, words: str, *command: str | Path, **environment: str) -> None:
    """Only that is wrong, in these words; what needs it was not looked at, and nothing else."""
    code, found = checked(*command, **environment)
    assert [name for name, (state, _) in found.items() if state == "wrong"] == [about], found
    assert re.search(words, found[about][1]), found[about][1]
    assert code == 1
    assert all(why == f"because of: {about}" for state, why in found.values() if state == "not looked at"), found


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_a_name_that_is_unknown(tmp_path):
    address = "server.invalid:9092"
    only_wrong("name", r"no host named server\.invalid .*DNS", address, "--node", site(tmp_path, address))


def test_a_port_that_is_closed(tmp_path):
    """As before any run, when the server is down."""
    address = f"127.0.0.1:{closed_port()}"
    folder = site(tmp_path, address)
    only_wrong("port", "connection refused.*start the server", "--node", folder)
    code, found = checked("--node", folder)
    assert tuple(found) == ORDER
    assert found["data"] == ("ok", f"{folder}/data.csv has 48 training and 12 test samples")
    assert [found[name][0] for name in ORDER[6:11]] == ["not looked at"] * 5
    assert code == 1


def test_a_firewall_that_drops_packets(tmp_path, stack):
    address, before = f"127.0.0.1:{stack.enter_context(dropping())}", time.monotonic()
    only_wrong("port", "no answer within 1 s.*firewall", "--node", site(tmp_path, address))
    assert time.monotonic() - before < 30  # without its own limit, minutes


@pytest.mark.parametrize("how", ["closed", "silent", "drops"])
def test_a_proxy_that_does_not_answer(how, tmp_path, stack):
    port = {
        "closed": closed_port,
        "silent": lambda: stack.enter_context(listening(silent)),
        "drops": lambda: stack.enter_context(dropping()),
    }[how]()
    folder, proxy = site(tmp_path, "server.example:9092"), f"http://name:secret@127.0.0.1:{port}"
    words = rf"the proxy 127\.0\.0\.1:{port} \(HTTPS_PROXY\) does not answer.*no_proxy"
    only_wrong("proxy", words, "--node", folder, HTTPS_PROXY=proxy)
    assert "secret" not in str(checked("--node", folder, HTTPS_PROXY=proxy))


@pytest.mark.parametrize(
    ("status", "about", "words"),
    [
        (
            "403 Forbidden",
            "proxy",
            r"refuses to connect to server\.example:9092 \(403 Forbidden\): have its owner allow",
        ),
        ("407 Proxy Authentication Required", "proxy", "name and password"),
        ("504 Gateway Timeout", "port", r"the proxy .* does not reach server\.example:9092"),
    ],
)
def test_a_proxy_that_does_not_connect(status, about, words, tmp_path, stack):
    proxy = f"http://127.0.0.1:{stack.enter_context(listening(answering(status)))}"
    only_wrong(about, words, "--node", site(tmp_path, "server.example:9092"), HTTPS_PROXY=proxy)


def test_no_proxy_is_obeyed_and_a_proxy_that_connects_is_used(tmp_path, stack):
    proxy = f"http://127.0.0.1:{stack.enter_context(listening(relaying))}"
    own(tmp_path / "own", names=("elsewhere.example",))
    server = f"localhost:{stack.enter_context(listening(with_tls(tmp_path / 'own')))}"
    folder = site(tmp_path, server)
    for names, words in (("localhost", "not used: no_proxy names localhost"), ("", "answers and connects")):
        _, found = checked("--node", folder, HTTPS_PROXY=proxy, no_proxy=names)
        assert words in found["proxy"][1]
        assert (found["port"][0], found["TLS"][0]) == ("ok", "wrong")


@pytest.mark.parametrize(("serve", "words"), [(greeting, "does not speak TLS"), (silent, "does not speak TLS")])
def test_another_program(serve, words, tmp_path, stack):
    address = f"127.0.0.1:{stack.enter_context(listening(serve))}"
    only_wrong("TLS", f"{words}.*another program", "--node", site(tmp_path, address))


def presented(place: Path, stack: ExitStack, names=("localhost",), days=(-1, 365)) -> tuple[Path, dict]:
    """A site whose CA is a hospital's, and what its server presents: files and certificates of own."""
    there = own(place / "own", names, days)
    port = stack.enter_context(listening(lambda connection: with_tls(place / "own")(connection)))
    folder = site(place, f"localhost:{port}")
    shutil.copy(place / "own" / "ca.crt", folder / "certificates" / "ca.crt")
    return folder, there


@pytest.mark.parametrize(
    ("days", "names", "words"),
    [
        ((-9, -2), ("localhost",), "the certificate of 'CN=server' expired on .*renew"),
        ((2, 9), ("localhost",), "the certificate of 'CN=server' is not valid before .*clock"),
        ((-1, 9), ("a.example", "b.example"), "covers a.example, b.example, not localhost: "),
    ],
)
def test_a_certificate_that_does_not_fit(days, names, words, tmp_path, stack):
    only_wrong("TLS", words, "--node", presented(tmp_path, stack, names, days)[0])


def test_a_missing_intermediate(tmp_path, stack):
    folder, there = presented(tmp_path, stack)
    (tmp_path / "own" / "server.pem").write_bytes(pem(there["leaf"]))
    only_wrong("TLS", "intermediate certificate is missing.*'CN=hospital issuing CA'", "--node", folder)


def test_another_ca(tmp_path, stack):
    folder, _ = presented(tmp_path, stack)
    (folder / "certificates" / "ca.crt").write_bytes(pem(Authority("university root").certificate))
    only_wrong("TLS", "of the CA 'CN=hospital root', .* of 'CN=university root'", "--node", folder)


def test_the_server_of_another_federation(tmp_path, stack):
    address = f"localhost:{closed_port()}"
    members.make(tmp_path / "other", address, None)
    port = stack.enter_context(listening(with_tls(tmp_path / "other" / "certificates")))
    words = "another 'CN=fewbytes CA' .* server of another federation"
    only_wrong("TLS", words, "--node", site(tmp_path, f"localhost:{port}"))


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ("key", r"keys/north is missing.*node init"),
        ("key", "not a node's private key"),
        ("CA", "ca.crt is not a certificate"),
        ("CA", "ca.crt expired on .*new invitation"),
        ("data", "data.csv.* no folder or table"),
        ("data", "data.csv cannot be read"),
        ("data", "patients cannot be read"),
        ("folder", "runs: cannot write there"),
        ("node.toml", "not a node's file"),
        ("node.toml", "polices"),
        ("node.toml", r'has superlink = ".*", not server\.example:9092'),
    ],
)
def test_files_of_a_site(about, words, tmp_path):
    """What is wrong with a site's own files, beside a server that is down."""
    address = f"127.0.0.1:{closed_port()}"
    folder = site(tmp_path, address)
    key, ca, data = folder / "keys" / "north", folder / "certificates" / "ca.crt", folder / "data.csv"
    if "is missing" in words:
        key.unlink()
    elif about == "key":
        key.write_text("no key")
    elif "not a certificate" in words:
        ca.write_text("no certificate")
    elif about == "CA":
        old = Authority("old")
        ca.write_bytes(pem(old.issue(old.name, old.key, True, days=(-9, -1))))
    elif "no folder" in words:
        data.unlink()
    elif about == "data" and "patients" in words:
        (folder / "patients").mkdir()
        change(folder, "data.csv", "patients")
    elif about == "data":
        data.write_bytes(b"\x00\xff" * 1000)
    elif about == "folder":
        (folder / "runs").write_text("a file where the folder goes")
    elif "polices" in words:
        change(folder, "[config]", "[config]\npolices = 3")
    elif "a node's file" in words:
        change(folder, "[config]", "[config")
    given = ["server.example:9092"] if "superlink" in words else [address]
    _, found = checked(*given, "--node", folder)
    assert found[about][0] == "wrong", found
    assert re.search(words, found[about][1]), found[about][1]
    assert {name for name, (state, _) in found.items() if state == "wrong"} <= {about, "port", "name"}


def test_a_broken_node_file_leaves_the_network_to_look_at(tmp_path):
    address = f"127.0.0.1:{closed_port()}"
    folder = site(tmp_path, address)
    (folder / "node.toml").write_text("superlink = ")
    code, found = checked(address, "--node", folder)
    assert code == 1
    assert (found["node.toml"][0], found["port"][0]) == ("wrong", "wrong")
    assert found["data"] == ("not looked at", "because of: node.toml")


def test_data_beside_the_nodes_folder(tmp_path):
    folder = site(tmp_path, f"127.0.0.1:{closed_port()}")
    (tmp_path / "data").mkdir()
    (folder / "data.csv").rename(tmp_path / "data" / "north.csv")
    change(folder, '"data.csv"', '"../data"')
    assert checked("--node", folder)[1]["data"][0] == "ok"


def test_data_that_only_need_the_settings_of_a_run(tmp_path):
    """A table without a column called label is no fault of the site's."""
    folder = site(tmp_path, f"127.0.0.1:{closed_port()}")
    table = folder / "data.csv"
    table.write_text(table.read_text().replace("age,dose,label", "age,dose,sick"))
    state, words = checked("--node", folder)[1]["data"]
    assert state == "not looked at"
    assert re.search(r"--config CONFIG says: .* has 60 readable samples, but by default: .*age, dose, sick", words)
    (tmp_path / "config.toml").write_text('method = "fedavg"\ntarget = ["sick"]\n')
    state, words = checked("--node", folder, "--config", tmp_path / "config.toml")[1]["data"]
    assert (state, words) == ("ok", f"{folder}/data.csv has 48 training and 12 test samples")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "node.toml: there is no such file"),
        (["--federation", "f", "--address", "a:1"], "give one of"),
        (["a:1", "--address", "a:1"], "leave them out at the server"),
        (["server.example"], "expected host:port"),
        (["--address", "a:0"], "port 0"),
        (["--listen", "a:1"], "needs --address"),
    ],
)
def test_a_usage_error(command, words, tmp_path):
    done = fewbytes("check", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_server(tmp_path, stack):
    """Before a run: all is well; then each thing that is not is named."""
    address = f"127.0.0.1:{closed_port()}"
    site(tmp_path, address)
    command = ("--federation", tmp_path / "federation", "--out", tmp_path / "runs")
    code, found = checked(*command)
    assert code == 0
    assert {state for state, _ in found.values()} == {"ok"}, found
    assert re.match(r"valid for 729 more days.*covers localhost, 127\.0\.0\.1", found["certificate"][1])
    assert "is free" in found["port"][1]
    file, certificates = tmp_path / "federation" / "federation.json", tmp_path / "federation" / "certificates"
    there = json.loads(file.read_text())

    def given(**changes) -> None:
        file.write_text(json.dumps(there | changes))

    taken = stack.enter_context(listening(greeting))
    given(address=f"127.0.0.1:{taken}")
    only_wrong("port", f"cannot listen on .*:{taken}: address already in use", *command)
    given(address="server.invalid:9092")
    code, found = checked(*command)
    assert "covers localhost, 127.0.0.1, not server.invalid" in found["certificate"][1]
    assert found["name"][0] == "wrong"
    given(members=[])
    only_wrong("members", "no members", *command)
    given(members=[{**there["members"][0], "key": "no key"}])
    only_wrong("members", "public key of north cannot be read", *command)
    given()
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").write_text("a file")
    only_wrong("folder", "runs: cannot write there", *command)
    (tmp_path / "runs").unlink()
    history = tmp_path / "federation" / "history.jsonl"
    before = history.read_text()
    history.write_text(before + json.dumps({"when": "2999-01-01T00:00:00+00:00", "what": "renewed"}) + "\n")
    only_wrong("clock", "hours before the last change here", *command)
    history.write_text(before)
    for path in (certificates / "server.pem", certificates / "server.key"):
        path.write_bytes(
            (own(tmp_path / "own", ("127.0.0.1.example",), (-9, -2)), (tmp_path / "own" / path.name).read_bytes())[1]
        )
    assert checked(*command)[1]["certificate"][0] == "wrong"


def test_a_server_without_a_federation(tmp_path):
    code, found = checked("--address", f"127.0.0.1:{closed_port()}", "--out", tmp_path / "runs")
    assert code == 0
    assert (found["certificate"][0], found["members"][0]) == ("not looked at", "not looked at")
