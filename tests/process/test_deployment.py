"""A deployment's real processes on loopback: who is let in, who is told why not, and that nothing is left behind."""

from __future__ import annotations

import functools
import http.client
import io
import os
import py_compile
import re
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from pki import own
from runs import PATIENCE, until

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.flower import children
from fewbytes.flower.application import app_config, application_files
from fewbytes.flower.certificates import renew, write_certificates, write_node_key
from fewbytes.flower.private.cli import (
    failure,
    in_json,
    list_nodes_command,
    read_answer,
    register_command,
    run_status_command,
    stop_command,
    submit_command,
)
from fewbytes.flower.private.files import connection_config
from fewbytes.flower.private.programs import ENVIRONMENT
from fewbytes.flower.processes import Processes

KINDS = ("resident", "stock")
HOSTILE = """
from pathlib import Path
import os
if "flwr-serverapp" not in " ".join(open("/proc/self/cmdline").read().split(chr(0))):
    Path({mark!r}).write_text("")
def grid_asks(grid):
    from flwr.app import Message, RecordDict
    while not list(grid.get_node_ids()):
        pass
    grid.push_messages([Message(RecordDict(), node, "query.hello") for node in grid.get_node_ids()])
"""
APPS = """
import os
import time
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
client = ClientApp()
server = ServerApp()
@server.main()
def main(grid, context):
    (Path(os.environ["FLWR_HOME"]) / "seen").write_text(str([(node.name, node.status) for node in grid.get_nodes()]))
    while True:
        time.sleep(0.1)
"""


def post(at: SimpleNamespace, path: str, headers: dict[str, str]) -> int:
    """The status of an empty request to a SuperLink, as Flower's own would send it."""
    tls = ssl.create_default_context(cafile=at.folder / "certificates" / "ca.crt")
    connection = http.client.HTTPSConnection(at.host, at.port, timeout=PATIENCE, context=tls)
    connection.request("POST", path, b"", {"Content-Type": "application/protobuf", **headers})
    status = connection.getresponse().status
    connection.close()
    return status


def own_address() -> str:
    """An address of this machine's that is not loopback; skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


def names(pem: Path) -> set[str]:
    there = x509.load_pem_x509_certificate(pem.read_bytes()).extensions
    return {str(name.value) for name in there.get_extension_for_class(x509.SubjectAlternativeName).value}


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory) -> Iterator[Callable[[str], SimpleNamespace]]:
    """A SuperLink, the registered node hospital-a and a stranger whose key nobody registered; nodes are of a kind."""
    with ExitStack() as stack:

        @functools.cache
        def get(kind: str) -> SimpleNamespace:
            folder = tmp_path_factory.mktemp(kind) / "deployment"
            deployment = stack.enter_context(Processes(folder, "127.0.0.1:0", resident=kind == "resident"))
            deployment.start_superlink(["link.example.org"])
            deployment.register(["hospital-a"])
            write_node_key(deployment.folder / "keys", "stranger")
            for name in ("hospital-a", "stranger"):
                deployment.start_node(name, {"partition-id": 0, "client-data": "C:\\it's here.toml"})
            host, port = deployment.address.split(":")
            return SimpleNamespace(deployment=deployment, folder=deployment.folder, host=host, port=int(port))

        yield get


@pytest.fixture(scope="module")
def running(of_kind) -> SimpleNamespace:
    """The same with resident nodes."""
    return of_kind("resident")


@pytest.fixture
def app(tmp_path) -> Path:
    folder = tmp_path / "app"
    (folder / "mini").mkdir(parents=True)
    for name, text in {
        "pyproject.toml": app_config("mini.apps:server", "mini.apps:client", {}),
        "mini/apps.py": APPS,
        "mini/__init__.py": "",
        "LICENSE": "x",
    }.items():
        (folder / name).write_text(text)
    return folder


def test_certificates_cover_their_hosts_and_are_kept(tmp_path):
    folder = tmp_path / "certificates"
    write_certificates(folder, ["link.example.org", "192.0.2.7", "::1"])
    assert names(folder / "server.pem") == {"localhost", "127.0.0.1", "link.example.org", "192.0.2.7", "::1"}
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "ca.crt": 0o644, "server.pem": 0o644, "ca.key": 0o600, "server.key": 0o600,
    }  # fmt: skip
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (folder / "ca.key").unlink()  # may be kept elsewhere
    write_certificates(folder, ["192.0.2.7"])
    assert all(path.read_bytes() == content for path, content in before.items() if path.exists())
    (folder / "ca.crt").unlink()
    with pytest.raises(UserError, match=r"ca\.crt is missing"):
        write_certificates(folder, [])
    with pytest.raises(UserError, match="host name"):
        write_certificates(tmp_path / "none", ["http://x"])
    assert not (tmp_path / "none").exists()


def test_node_keys_are_p384_and_kept(tmp_path):
    write_node_key(tmp_path, "hospital-a")
    private = serialization.load_ssh_private_key((tmp_path / "hospital-a").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    public = serialization.load_ssh_public_key((tmp_path / "hospital-a.pub").read_bytes())
    assert public == private.public_key()
    assert (tmp_path / "hospital-a").stat().st_mode & 0o777 == 0o600
    before = (tmp_path / "hospital-a").read_bytes()
    (tmp_path / "hospital-a.pub").unlink()
    write_node_key(tmp_path, "hospital-a")
    assert (tmp_path / "hospital-a").read_bytes() == before
    assert serialization.load_ssh_public_key((tmp_path / "hospital-a.pub").read_bytes()) == public
    for bad in ("", "-a", "../a", "a b", "a" * 65, "a/b", "a\n", "a.pub"):
        with pytest.raises(UserError, match="not a name"):
            write_node_key(tmp_path, bad)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", ":80", "127.0.0.1:70000", "::1:80", "http://x:80"])
def test_an_address_of_another_form_is_refused(tmp_path, address):
    with pytest.raises(UserError, match="expected host:port"):
        Processes(tmp_path, address)


def test_only_tls_with_our_authority_is_spoken(running):
    ours = ssl.create_default_context(cafile=running.folder / "certificates" / "ca.crt")
    for name in ("127.0.0.1", "localhost", "link.example.org"):
        with (
            socket.create_connection((running.host, running.port)) as plain,
            ours.wrap_socket(plain, server_hostname=name) as tls,
        ):
            assert tls.version() == "TLSv1.3"
    other = ssl.create_default_context()
    for context, name in ((other, "127.0.0.1"), (ours, "elsewhere.example.org")):
        with (
            socket.create_connection((running.host, running.port)) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            context.wrap_socket(plain, server_hostname=name)
    connection = http.client.HTTPConnection(running.host, running.port, timeout=PATIENCE)
    connection.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        connection.getresponse()
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_registered_node_comes_online_and_a_stranger_is_refused(kind, of_kind):
    running = of_kind(kind)
    deployment, log = running.deployment, running.folder / "logs" / "stranger.log"
    assert until(lambda: deployment.node_status() == {"hospital-a": "online"})
    if kind == "stock":
        assert until(deployment.ended)
        ((name, code, reason),) = deployment.ended()
        assert (name, code) == ("stranger", 1)
        assert "Failed to activate SuperNode" in reason
        assert "Exit Code: 305" in log.read_text()
    else:  # it may yet be registered
        assert until(lambda: "does not accept this node yet: this node is not registered there" in log.read_text())
        assert deployment.ended() == []
    with sqlite3.connect(f"file:{running.folder}/superlink.db?mode=ro", uri=True) as database:
        assert database.execute("select name, status from node").fetchall() == [("hospital-a", "online")]
    database.close()
    deployment.register(["hospital-a"])
    with pytest.raises(UserError, match="hospital-a is running already"):
        deployment.start_node("hospital-a", {})
    with pytest.raises(UserError, match="private key"):
        deployment.start_node("hospital-b", {})


def test_a_replaced_key_is_registered_and_the_old_one_refused(tmp_path):
    """Of a site that lost its machine; the nodes of others stay as they are."""
    with Processes(tmp_path, "127.0.0.1:0", resident=True) as deployment:
        deployment.start_superlink()
        deployment.register(["north", "south"])
        before = deployment.node_ids()
        deployment.start_node("north", {})
        assert until(lambda: deployment.node_status() == {"north": "online", "south": "registered"})
        assert until((tmp_path / "keys" / "north.number").exists)
        public = tmp_path / "keys" / "north.pub"
        lost = public.read_bytes()
        for path in (public, tmp_path / "keys" / "north"):
            path.rename(path.with_name(f"lost-{path.name}"))
        (tmp_path / "keys" / "north.number").rename(tmp_path / "keys" / "lost-north.number")
        deployment.register(["north", "south"])
        after = deployment.node_ids()
        assert after["south"] == before["south"]
        assert after["north"] != before["north"]
        log = tmp_path / "logs" / "north.log"
        assert until(lambda: "does not accept this node" in log.read_text(), 30), log.read_text()
        deployment.start_node("lost-north", {})  # again, with the old key
        log = tmp_path / "logs" / "lost-north.log"
        assert until(lambda: "not registered there" in log.read_text()), log.read_text()
        assert deployment.node_status() == {"north": "registered", "south": "registered"}
        public.write_bytes(lost)
        with pytest.raises(UserError, match=r"north\.pub: the key is another node's, or was removed"):
            deployment.register(["north"])
        assert deployment.node_ids() == after
        assert deployment.keep_only(["south"]) == ["north"]
        assert deployment.node_status() == {"south": "registered"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_submitted_watched_and_stopped(kind, of_kind, app):
    running = of_kind(kind)
    deployment = running.deployment
    assert until(lambda: deployment.node_status() == {"hospital-a": "online"})
    run = deployment.submit(app)
    assert until(lambda: deployment.run_status(run) == ("running", ""))
    seen = running.folder / "flower-home" / "seen"
    assert until(lambda: seen.exists() and seen.read_text() == "[('hospital-a', 'online')]")
    deployment.stop(run)
    assert deployment.run_status(run)[0] == "finished:stopped"
    for doing in (lambda: deployment.stop(run), lambda: deployment.run_status(7)):
        with pytest.raises(FewbytesError, match=r"already finished|run 7: .*not found"):
            doing()
    (app / "mini" / "apps.py").write_text("server = None\n")
    with pytest.raises(FewbytesError, match=r"attribute client in module mini\.apps"):
        deployment.submit(app)


def test_a_stranger_with_the_certificate_alone_can_do_nothing(running, app, tmp_path):
    """On this machine, where the control interface listens: submit, register, list, stop, take the server's task."""
    (tmp_path / "ca.crt").write_bytes((running.folder / "certificates" / "ca.crt").read_bytes())
    name, text = connection_config(running.deployment.address, tmp_path / "ca.crt")
    (tmp_path / name).write_text(text)
    write_node_key(tmp_path / "keys", "mine")
    commands = [
        submit_command(app), register_command(tmp_path / "keys" / "mine.pub", "mine"), list_nodes_command(),
        run_status_command(1), stop_command(1),
    ]  # fmt: skip
    flwr = [str(Path(sys.executable).parent / "flwr")]
    environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(tmp_path)}
    for command in commands:
        done = subprocess.run([*flwr, *in_json(command)[1:]], env=environment, capture_output=True, timeout=PATIENCE)
        assert re.search("authenticat|logged in", failure(read_answer(done.stdout + done.stderr))), done.stdout
    for claimed in ("", "Bearer ", "Bearer none", "Basic x"):
        status = post(running, "/v1/control/list-runs", {"Authorization": claimed} if claimed else {})
        assert status == 401, claimed
    assert post(running, "/v1/runtime/acquire-task", {}) == 401
    assert running.deployment.node_status() == {"hospital-a": "online"}


def test_long_requests_are_taken_of_registered_nodes_only(running):
    ca, said = running.folder / "certificates" / "ca.crt", {}
    for name in ("hospital-a", "stranger"):
        key = serialization.load_ssh_private_key((running.folder / "keys" / name).read_bytes(), None)
        signing = [NodeAuthHttpInterceptor(key, key.public_key())]
        with FleetHttpClient.from_server_address(running.deployment.address, False, ca.read_bytes(), signing) as client:
            with pytest.raises(httpx.HTTPStatusError) as refused:
                client.PushObject(PushObjectRequest(object_content=bytes(100_000)))
            said[name] = refused.value.response.text
    assert said["stranger"] == "from registered nodes only\n"
    assert "SuperNode" in said["hospital-a"]  # Flower has read it, and finds no node's id in it


def test_from_elsewhere_only_nodes_are_heard(tmp_path):
    address = own_address()
    with Processes(tmp_path, "0.0.0.0:0") as deployment:
        deployment.start_superlink([address])
        token = (tmp_path / "certificates" / "control.token").read_text()
        place = SimpleNamespace(folder=tmp_path, host=address, port=int(deployment.address.split(":")[1]))
        for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/list-runs"):
            assert post(place, path, {"Authorization": f"Bearer {token}"}) in (403, 404), path
        assert post(place, "/v1/fleet/pull-messages", {}) not in (403, 404, 200)  # heard, and refused as no node
        here = SimpleNamespace(folder=tmp_path, host="127.0.0.1", port=place.port)
        assert post(here, "/v1/control/list-runs", {"Authorization": f"Bearer {token}"}) == 200
        tls = ssl.create_default_context(cafile=tmp_path / "certificates" / "ca.crt")
        for host in (address, "127.0.0.1"):
            for path in ("/openapi.json", "/docs", "/redoc", "/"):
                answer = httpx.get(f"https://{host}:{place.port}{path}", verify=tls)
                assert answer.status_code == (404 if host == "127.0.0.1" else 403), path
                assert "openapi" not in answer.text


def bundle(files: dict[str, bytes]) -> bytes:
    """An application's bundle, as Flower writes it."""
    manifest = "\n".join(f"{name},{sha256(text).hexdigest()},{8 * len(text)}" for name, text in files.items())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as there:
        for name, text in {**files, ".info/CONTENT": manifest.encode()}.items():
            there.writestr(name, text)
    return packed.getvalue()


def submit(deployment: Processes, app: Path, packed: bytes) -> None:
    """Submit a bundle of any content."""
    (deployment.folder / "hostile.fab").write_bytes(packed)
    code = (
        "import importlib, pathlib, sys; from flwr.cli.app import app; packed = pathlib.Path(sys.argv.pop(1)); "
        "importlib.import_module('flwr.cli.run.run').build_fab_from_disk = lambda _: packed.read_bytes(); app()"
    )
    command = [sys.executable, "-c", code, str(deployment.folder / "hostile.fab"), *submit_command(app)[1:]]
    home = {"FLWR_HOME": str(deployment.folder / "flower-home")}
    subprocess.run(command, env={**os.environ, **ENVIRONMENT, **home}, check=True, timeout=120)


@pytest.mark.parametrize("name", ["apps.py", "apps/__init__.pyc"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_runs_the_installed_application_only(kind, name, tmp_path, app):
    resident, mark = kind == "resident", tmp_path / "ran"
    code = HOSTILE.format(mark=str(mark)) + APPS.replace("while True:", "grid_asks(grid)\n    while True:")
    files = {each: text.encode() for each, text in application_files({}).items()}
    if name.endswith(".pyc"):  # which Python takes before apps.py
        (tmp_path / "hostile.py").write_text(code)
        files[name] = Path(py_compile.compile(str(tmp_path / "hostile.py"), str(tmp_path / "hostile.pyc"))).read_bytes()
    else:
        files[name] = code.encode()
    with Processes(tmp_path / "deployment", "127.0.0.1:0", any_app=False, resident=resident) as deployment:
        deployment.start_superlink()
        deployment.register(["a"])
        deployment.start_node("a", {})
        submit(deployment, app, bundle(files))
        log = deployment.folder / "logs" / "a.log"
        told = "FAB verification failed|could not be verified|refused: the run's application is not the one installed"
        assert until(lambda: mark.exists() or re.search(told, log.read_text()))
    assert not mark.exists()


SERVED = """
import sys
from pathlib import Path
from fewbytes.flower.processes import Processes
from runs import until
with Processes(Path(sys.argv[1]), sys.argv[2], resident=True) as deployment:
    deployment.start_superlink(sys.argv[4:])
    deployment.register(["a"])
    deployment.start_node("a", {}, superlink=sys.argv[3].replace("PORT", deployment.address.rpartition(":")[2]) or None)
    assert until(lambda: deployment.node_status() == {"a": "online"}), (deployment.folder / "logs/a.log").read_text()
    deployment.check_launcher()
"""


def served(folder: Path, listen: str, superlink: str = "", hosts: tuple[str, ...] = (), **environment: str) -> str:
    """Start a SuperLink and a node that must get through; returns what goes wrong."""
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])} | environment
    command = [sys.executable, "-c", SERVED, str(folder), listen, superlink, *hosts]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize(
    ("listen", "superlink"),
    [("[::]:0", "127.0.0.1:PORT"), ("[::]:0", "[::1]:PORT"), ("[::1]:0", ""), ("own", "own"), ("0.0.0.0:0", "own")],
)
def test_nodes_reach_a_superlink_wherever_it_listens(listen, superlink, tmp_path):
    """Also over IPv6, and at one of several addresses of its machine."""
    own = own_address() if "own" in (listen, superlink) else ""
    hosts = ("::1", own) if own else ("::1",)
    at = {"own": f"{own}:PORT"}
    assert not served(tmp_path, f"{own}:0" if listen == "own" else listen, at.get(superlink, superlink), hosts)


def test_a_proxy_is_not_asked_for_this_machine(tmp_path):
    nobody = "http://127.0.0.1:9"
    assert not served(tmp_path, "127.0.0.1:0", HTTPS_PROXY=nobody, https_proxy=nobody, ALL_PROXY=nobody)


def test_own_certificates_need_not_cover_this_machine(tmp_path):
    own(tmp_path / "certificates", names=("server.example",))
    assert not served(tmp_path, "127.0.0.1:0", hosts=("server.example",))


def test_a_renewed_certificate_is_served_without_a_restart(tmp_path):
    with Processes(tmp_path, "127.0.0.1:0") as deployment:
        deployment.start_superlink(["link.example.org"])
        folder, (host, port) = tmp_path / "certificates", deployment.address.split(":")
        tls = ssl.create_default_context(cafile=folder / "ca.crt")

        def is_served() -> bool:
            with (
                socket.create_connection((host, int(port))) as plain,
                tls.wrap_socket(plain, server_hostname="link.example.org") as shown,
            ):
                pem = ssl.DER_cert_to_PEM_cert(shown.getpeercert(binary_form=True))
            return pem.strip() == (folder / "server.pem").read_text().strip()

        assert is_served()
        renew(folder)
        assert until(is_served, 20)


def test_a_second_superlink_is_told_why_not(running, tmp_path):
    with (
        pytest.raises(UserError, match="another deployment"),
        Processes(running.folder, "127.0.0.1:0"),
    ):
        pass
    wanted = f"the SuperLink cannot listen on {running.deployment.address}: address already in use"
    with Processes(tmp_path, running.deployment.address) as second, pytest.raises(UserError, match=wanted):
        second.start_superlink()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_the_context_and_its_nodes_return(kind, tmp_path, app):
    resident = kind == "resident"
    with Processes(tmp_path / "deployment", "127.0.0.1:0", resident=resident) as deployment:
        deployment.start_superlink()
        deployment.register(["a"])
        deployment.start_node("a", {})
        run = deployment.submit(app)
        assert until(lambda: deployment.run_status(run)[0] == "running" and deployment.node_status()["a"] == "online")
        family = children.family_of({os.getpid()})
        said = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid, _ in family]
        kinds = {word.split("/")[-1] for words in said for word in words[:4]}
        assert {"superlink", "node" if resident else "flower-supernode"} <= kinds
        assert "flwr-serverapp" in kinds
        launchers = [words for words in said if any(word.endswith("flower-superexec") for word in words[:4])]
        assert len(launchers) == 2 - resident  # the SuperLink's, and a stock node has its own
        ours = children.family_of({process.process.pid for process in (deployment._superlink, deployment._nodes["a"])})
        assert len(ours) >= 4 - resident  # which starts nobody
    assert not ours & children.running().keys()
    with deployment:
        deployment.start_superlink()
        deployment.register(["a"])
        deployment.start_node("a", {})
        assert until(lambda: deployment.node_status() == {"a": "online"})
        assert deployment.ended() == []
        os.kill(deployment._superlink.process.pid, signal.SIGKILL)
        deployment._superlink.process.wait()
        with pytest.raises(FewbytesError, match=r"SuperLink .*-9: .*SIGKILL .*superlink\.log"):
            deployment.check()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize(("kind", "count"), [("resident", 4), ("stock", 5)])
def test_a_kill_leaves_nothing(kind, count, tmp_path):
    script = f"""
import os, signal, time
from pathlib import Path
from fewbytes.flower import children
from fewbytes.flower.application import application_files
from fewbytes.flower.processes import Processes
with Processes(Path({str(tmp_path)!r}), "127.0.0.1:0", resident={kind == "resident"}) as deployment:
    deployment.start_superlink()
    deployment.register(["a"])
    deployment.start_node("a", {{}})
    # itself, two services, each of Flower's with its executor
    while len(family := children.family_of({{os.getpid()}})) < {count}:
        time.sleep(0.1)
    print(*(f"{{pid}},{{start}}" for pid, start in family), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    family = {(int(pid), start) for pid, start in (each.split(",") for each in done.stdout.split())}
    assert len(family) >= count
    assert until(lambda: not family & children.running().keys())
