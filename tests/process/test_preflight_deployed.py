"""`fewbytes check` beside a SuperLink that runs: keys, clocks, versions, proxies; and disks and rights of a site."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import PATIENCE

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

import httpx
from broken import closed_port, listening, relaying, site
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fewbytes.flower.answering import CHECK, MEGABYTE
from fewbytes.flower.certificates import write_file
from fewbytes.flower.fleet import private_key
from fewbytes.flower.processes import Processes

SHIFTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && id == CLOCK_REALTIME) at->tv_sec += atoi(getenv("SHIFT"));
    return failed;
}
"""
ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root on Linux"
)


def checked(folder: Path, *start: str, before: Callable[[], None] | None = None, **environment: str) -> SimpleNamespace:
    """The exit code, and the lines that are wrong, of a check at a site; `start`: how the command is started."""
    command = [*start, sys.executable, "-m", "fewbytes", "check", "--node", str(folder), "--json"]
    given = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    python = environment.pop("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [python, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        env=given | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=before,
        check=False,
    )
    assert done.stdout, done.stderr
    found = {line["about"]: line for line in json.loads(done.stdout)}
    wrong = {name: line["words"] for name, line in found.items() if line["state"] == "wrong"}
    assert done.returncode == bool(wrong)
    return SimpleNamespace(wrong=wrong, all=found)


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A SuperLink that knows north, has removed south and never heard of west."""
    place, address = tmp_path_factory.mktemp("there"), f"127.0.0.1:{closed_port()}"
    folders = {name: site(place, address, name) for name in ("north", "south", "west")}
    certificates = place / "federation" / "certificates"
    with Processes(place / "deployment", address, False, True, certificates=certificates) as deployment:
        deployment.start_superlink()
        for name in ("north", "south"):
            public = (folders[name] / "keys" / f"{name}.pub").read_bytes()
            (deployment.folder / "keys").mkdir(exist_ok=True)
            write_file(deployment.folder / "keys" / f"{name}.pub", public)
        deployment.register(["north", "south"])
        deployment.keep_only(["north"])
        yield SimpleNamespace(place=place, address=address, **folders)


def test_all_is_well(there):
    found = checked(there.north)
    assert not found.wrong
    assert {line["state"] for line in found.all.values()} == {"ok"}
    assert found.all["versions"]["words"].startswith(f"fewbytes {version('fewbytes')}, flwr {version('flwr')}, torch ")
    assert re.fullmatch(r"1 MB takes \d+\.\d\d s to the server and \d+\.\d\d s from it", found.all["1 MB"]["words"])
    assert "agrees" in found.all["clock"]["words"]


def test_it_goes_through_a_proxy(there):
    with listening(relaying) as port:
        found = checked(there.north, HTTPS_PROXY=f"http://127.0.0.1:{port}")
    assert not found.wrong
    assert found.all["port"]["words"].endswith(f"through the proxy 127.0.0.1:{port}")


def test_a_key_that_is_unknown(there):
    (words,) = checked(there.west).wrong.values()
    assert re.search("does not know the key .*west: it was never accepted.*federation join", words)


def test_a_key_that_was_revoked(there):
    found = checked(there.south)
    assert list(found.wrong) == ["membership"]
    assert re.search("has removed the key .*south .*new invitation", found.wrong["membership"])


@pytest.mark.parametrize(("seconds", "words"), [(600, "10 minutes ahead of"), (-600, "10 minutes behind")])
def test_a_clock_that_is_wrong(seconds, words, there, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to shift a process's clock")
    (tmp_path / "shift.c").write_text(SHIFTED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "shift.so", "shift.c", "-ldl"], cwd=tmp_path, check=True)
    found = checked(there.north, LD_PRELOAD=str(tmp_path / "shift.so"), SHIFT=str(seconds))
    assert list(found.wrong) == ["clock"]
    assert f"this machine's clock is {words} the server's" in found.wrong["clock"]
    assert found.all["membership"]["words"] == "because of: clock"


@pytest.mark.parametrize(("package", "number"), [("fewbytes", "0.8.0"), ("flwr", "1.41.0")])
def test_another_version(package, number, there, tmp_path):
    """As Python finds it where another version is installed."""
    about = tmp_path / f"{package}-{number}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    found = checked(there.north, PYTHONPATH=str(tmp_path))
    assert list(found.wrong) == ["versions"]
    words = rf"{package} is {number} here and {version(package)} at the server, which refuses"
    assert re.match(words, found.wrong["versions"])


def mounted(folder: Path, options: str) -> list[str]:
    """A command that runs another where a small file system is at the folder."""
    (folder / "runs").mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} none {folder}/runs && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh"]


@ROOT
@pytest.mark.parametrize(
    ("options", "about", "words"),
    [
        ("size=64k", "disk", r"0\.1 MB are free in .*/runs, and runs need 100: free some space"),
        ("ro,size=900m", "folder", "runs: cannot write there: Read-only file system"),
    ],
)
def test_a_disk(options, about, words, there):
    found = checked(there.north, *mounted(there.north, options))
    assert list(found.wrong) == [about]
    assert re.search(words, found.wrong[about])


def as_a_person() -> None:
    """Have root obey the rights of files, as others do."""
    for right in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP


@ROOT
@pytest.mark.parametrize(
    ("path", "about", "words"),
    [
        ("keys/north", "key", "keys/north: not a node's private key: PermissionError"),
        ("certificates/ca.crt", "CA", "ca.crt is not a certificate: Permission denied"),
        ("data.csv", "data", "data.csv cannot be read: .*[Pp]ermission"),
        ("node.toml", "node.toml", "Permission denied"),
        ("runs", "folder", "runs: cannot write there: Permission denied"),
    ],
)
def test_rights(path, about, words, tmp_path):
    folder = site(tmp_path, f"127.0.0.1:{closed_port()}")
    (folder / "runs").mkdir()
    (folder / path).chmod(0o500 if path == "runs" else 0)
    found = checked(folder, before=as_a_person)
    assert re.search(words, found.wrong.pop(about))
    assert not found.wrong.keys() - {"port"}


def test_strangers_learn_and_send_nothing(there):
    """Neither versions, nor a byte; a member sends no more than a megabyte."""
    tls = ssl.create_default_context(cafile=there.north / "certificates" / "ca.crt")
    with httpx.Client(verify=tls, trust_env=False) as client:
        for method in ("GET", "POST"):
            answer = client.request(method, f"https://{there.address}{CHECK}", content=bytes(MEGABYTE))
            assert (answer.status_code, answer.content) == (401, b"")
        key = private_key(there.north / "keys" / "north")
        request = client.build_request("POST", f"https://{there.address}{CHECK}", content=bytes(MEGABYTE + 1))
        signing = NodeAuthHttpInterceptor(key, key.public_key())
        answer = signing.intercept(SimpleNamespace(request=request), lambda context: client.send(context.request))
        assert answer.status_code == 413
