"""What a server may have a node do, what a node may tell, and which answers are taken for this order and this run."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import random
import sqlite3
import sys
import time
import tomllib
import tracemalloc
import warnings
import zipfile
from contextlib import closing, suppress

import msgspec
import pytest
from cases import CASES, task_of

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import CLIENTS, Exchanges, MemoryGrid, left_out, rounds_of, run
from flwr.app import Message

from fewbytes.experiments import app
from fewbytes.experiments.groups import GROUPS
from fewbytes.flower.application import (
    APPLICATION,
    APPS,
    BUNDLE_BYTES,
    MANIFEST,
    UNPACKED_BYTES,
    app_config,
    application_files,
    is_installed,
    manifest_of,
)
from fewbytes.flower.apps import FOLDERS, client_app
from fewbytes.flower.guarded import Gate, knows
from fewbytes.flower.messages import read_content, seal_of, write_content
from fewbytes.flower.node import Order
from fewbytes.flower.private import files, requests

FEW = fb.Policy(round_timeout=5, connect_timeout=5, min_replies=0.25, strikes=99)
REPLAYED = "it answers another order, of an earlier round or another run"


class Recorder(Exchanges):
    """Keeps client 1's replies, and gives one of those before in place of every later one."""

    def __init__(self, how: str, kept: list[tuple[Message, Message]] | None = None) -> None:
        super().__init__(kept)
        self.how, self.given = how, 0

    def __call__(self, message: Message, reply: Message) -> list[Message]:
        if not (before := self.before(message, reply)):
            return [reply]
        self.given += 1
        old = before[0][1].content
        if self.how == "whole":
            return [Message(old, reply_to=message)]
        text, frame = read_content(reply.content)
        if self.how == "frame":
            frame = read_content(old)[1]
        else:
            text = read_content(old)[0]
        return [Message(write_content(text, bytes(frame), seal=seal_of(reply.content)), reply_to=message)]


def orders(grid: MemoryGrid) -> list[Order]:
    asked = [message for message in grid.asked if message.metadata.message_type != "query.hello"]
    return [msgspec.msgpack.decode(read_content(message.content)[0], type=Order) for message in asked]


@pytest.mark.parametrize("how", ["whole", "frame", "words"])
@pytest.mark.parametrize("name", ["fedavg", "fedpurin", "fedkd", "feddistill"])
def test_no_replay_of_a_clients_own_earlier_reply_is_accepted(name, how, tmp_path):
    recorder = Recorder(how)
    result, _ = run(name, tmp_path / "run", fault=recorder, policy=FEW, rounds=4)
    assert recorder.given
    whys = [left["why"] for row in result.rounds for left in row.get("left_out", []) if left["client"] == 1]
    assert whys == [REPLAYED] * recorder.given


@pytest.mark.parametrize("where", ["resumed", "other"])
def test_no_reply_from_before_a_restart_or_of_another_run_is_accepted(where, tmp_path):
    before, during = Recorder("whole"), tmp_path / "run"

    class Stop(fb.Watcher):
        def scored(self, row):
            if row["round"] == 2:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        run("fedpurin", during, fault=lambda m, r: before.kept.append((m, r)) or [r], policy=FEW, watcher=Stop())
    after = Recorder("whole", [pair for pair in before.kept if pair[0].metadata.dst_node_id == 1001])
    folder = during if where == "resumed" else tmp_path / "another" / "run"
    result, _ = run("fedpurin", folder, fault=after, policy=FEW, resume=where == "resumed")
    whys = [left["why"] for row in result.rounds for left in row.get("left_out", [])]
    assert after.given
    assert whys == [REPLAYED] * after.given


def test_a_second_server_with_the_runs_name_is_refused_and_the_first_goes_on(tmp_path):
    nodes = tmp_path / "nodes"
    app = client_app(CASES["fedpurin"], task_of("fedpurin"), nodes)
    run("fedpurin", tmp_path / "first" / "run", grid=MemoryGrid(app, CLIENTS))
    with pytest.raises(fb.FewbytesError, match="another run, or another server's") as refused:
        run("fedpurin", tmp_path / "second" / "run", grid=MemoryGrid(app, CLIENTS))
    assert "\n" not in str(refused.value)
    run("fedpurin", tmp_path / "first" / "run", grid=MemoryGrid(app, CLIENTS), resume=True)


def test_an_hour_back_changes_nothing_for_a_run_that_goes_on(tmp_path, monkeypatch):
    class Stop(fb.Watcher):
        def replied(self, client):
            if client == 1 and len(rounds_of(tmp_path / "run")) == 1:
                raise RuntimeError

    grids = [MemoryGrid(client_app(CASES["fedpurin"], task_of("fedpurin"), tmp_path), CLIENTS) for _ in range(3)]
    for attempt, grid in enumerate(grids[:2]):  # twice from the same checkpoint
        with pytest.raises(RuntimeError):
            run("fedpurin", tmp_path / "run", grid=grid, resume=attempt > 0, watcher=Stop())
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
    result, _ = run("fedpurin", tmp_path / "run", grid=grids[2], resume=True)
    assert result.summary["status"] == "done"
    assert left_out(tmp_path / "run") == []
    numbers = [[order.job.number for order in orders(grid)] for grid in grids]
    assert max(numbers[0]) < min(numbers[1])
    assert max(numbers[1]) < min(numbers[2])
    assert len({order.nonce for grid in grids for order in orders(grid)}) == 1


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of somebody's, that says so when it is imported."""
    (tmp_path / "theirs.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "import torch\n"
        "from fewbytes.methods.fedavg import FedAvg\n"
        "def net(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
        "def data():\n"
        "    return (torch.rand(40, 1, 8, 8), torch.arange(40) % 2), (torch.rand(8, 1, 8, 8), torch.arange(8) % 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "imported"
    sys.modules.pop("theirs", None)


@pytest.mark.parametrize("key", ["model", "dataset", "method", "public"])
def test_code_that_a_server_names_is_imported_where_its_node_allows_it(key, own):
    config = {"method": "fedavg", "clients": 2, "rounds": 1, "parameters.epochs": 1}
    config[key] = {"model": "theirs:net", "method": "theirs:FedAvg"}.get(key, "theirs:data")
    for allow in ({}, {"allow": "other,theirs.more,the"}):
        with pytest.raises(fb.UserError, match=r"'theirs:.*' is code"):
            app.serve_client(config, {"partition-id": 0, **allow})
    assert not own.exists()
    for allow in ("other, theirs", config[key]):
        assert app.serve_client(config, {"partition-id": 0, "allow": allow}).task.problem.clients
    assert own.exists()


@pytest.mark.parametrize("name", ["{}/secret", "../secret", "~", "."])
def test_a_folder_that_a_server_names_is_not_read_unless_its_node_allows_it(name, tmp_path, monkeypatch):
    (tmp_path / "secret" / "patient-4711").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEWBYTES_DATA", str(tmp_path / "data"))
    name = name.format(tmp_path)
    config = {"method": "fedavg", "clients": 1, "rounds": 1, "dataset": name, "partition": "local"}
    with pytest.raises(fb.UserError, match="under FEWBYTES_DATA") as told:
        app.serve_client(config, {"partition-id": 0})
    assert "patient" not in str(told.value)
    if name == f"{tmp_path}/secret":
        with pytest.raises(fb.UserError, match="no labelled images") as told:
            app.serve_client(config, {"partition-id": 0, "allow": str(tmp_path)})
        assert "patient" not in str(told.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speeds", "{secret}"), ("speeds", "/dev/zero"), ("speeds", "1,2"), ("ray_address", "evil.example:6379"),
        ("config", "{secret}"), ("allow", "theirs"), ("client-folder", "/"),
    ],
)  # fmt: skip
def test_a_node_refuses_settings_that_a_server_has_no_business_with(key, value, tmp_path):
    (tmp_path / "secret").write_text("root:$6$hash")
    config = {"method": "fedavg", "clients": 2, "rounds": 1, "parameters.epochs": 1, "min_replies": 0.7, "out": "/x"}
    assert app.serve_client(config, {"partition-id": 0}).task.problem.clients
    with pytest.raises(fb.UserError) as told:
        app.serve_client(config | {key: value.format(secret=tmp_path / "secret")}, {"partition-id": 0})
    assert "hash" not in str(told.value)


SETTINGS_THAT_NAME_PLACES = [
    *(key for group in GROUPS.values() for key, each in group.declared().items() if each.kind in (str, str | None)),
    "method", "parameters.generator", "public", "partition_options.path",
]  # fmt: skip


@pytest.mark.parametrize("key", SETTINGS_THAT_NAME_PLACES)
def test_no_setting_has_a_node_open_a_file_that_a_server_names(key, tmp_path, monkeypatch):
    secret, seen = tmp_path / "secret", []
    os.mkfifo(secret)  # who opens it for reading waits for ever
    monkeypatch.setattr(app, "_served", {})

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]) == str(secret):
            seen.append(key)
            raise PermissionError(str(secret))

    HOOKS[:] = [note]
    config = {"method": "fedavg", "clients": 2, "rounds": 1, "parameters.epochs": 1}
    if key == "parameters.generator":
        config["method"] = "fedktl"
    try:
        with suppress(fb.UserError):  # none for what is the server's own
            app.serve_client(config | {key: str(secret)}, {"partition-id": 0})
    finally:
        HOOKS.clear()
    assert not seen


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"dataset": "digits", "dataset.x": 1}, "'dataset' both"),
        ({"schema": "[" * 100_000}, "schema"),
        ({"image_size": 60_000}, "image_size"),
        ({"model": "resnet8:width=20000"}, "1 to 1024 for width"),
        ({"model": "mlp:hidden=1000000000"}, "1 to 65536 for hidden"),
    ],
)
def test_what_a_server_says_is_refused_in_one_line_and_takes_no_memory(said, words):
    config = {"method": "fedavg", "clients": 2, "rounds": 1, "dataset": "digits", **said}
    with pytest.raises(fb.UserError, match=words):
        app.serve_client(config, {"partition-id": 0})


HOOKS: list = []  # an audit hook cannot be taken away again
sys.addaudithook(lambda event, arguments: [hook(event, arguments) for hook in HOOKS])


def test_what_fails_on_a_node_is_told_without_words_and_traces(tmp_path, monkeypatch, capfd):
    @functools.wraps(fb.FedAvg.train)
    def train(self, state, message, site):
        raise OSError(f"cannot read '{tmp_path}/hospital/patient.png': no such file")

    monkeypatch.setattr(fb.FedAvg, "train", train)
    answers = []
    with pytest.raises(fb.FewbytesError, match=r"OSError, .*\(test_trust\.py, line \d+\)"):
        run("fedavg", tmp_path / "run", fault=lambda m, r: answers.append(r) or [r])
    sent = b"".join(read_content(answer.content)[0] for answer in answers)
    assert b"Traceback" not in sent
    assert b"patient" not in sent
    log = capfd.readouterr().err
    assert "Traceback" in log
    assert f"{tmp_path}/hospital/patient.png" in log


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/srv/data/a/b.csv has 3 rows", "b.csv has 3 rows"),
        ("found train/<class>/, in '~/x/y'", "found train/<class>/, in 'y'"),
        ("OSError: ../keys/a: 1/2 of ./it", "OSError: a: 1/2 of it"),
    ],
)
def test_of_a_path_the_last_part_is_told(said, told):
    assert FOLDERS.sub("", said) == told


def bundle(*added: tuple[str, str | bytes], **changed: str | None) -> bytes:
    """The installed application's bundle with files added, and others changed or (None) left out."""
    known = {name: text.encode() for name, text in application_files({"rounds": 3}).items()}
    listed = {name: text.encode() for name, text in changed.items() if text is not None and name != MANIFEST}
    files = {**application_files({"rounds": 3}), MANIFEST: "\n".join(manifest_of(known | listed)), **changed}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as there, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, text in [*files.items(), *added]:
            if text is not None:
                there.writestr(name, text)
    return file.getvalue()


CONFIG = application_files({"rounds": 3})["pyproject.toml"]
LISTED = "\n".join(manifest_of({name: text.encode() for name, text in application_files({"rounds": 3}).items()}))


@pytest.mark.parametrize(
    "hostile",
    [
        *(
            bundle((name, b""))
            for name in (
                "apps/__init__.pyc",
                "fewbytes/__init__.pyc",
                "torch.pyc",
                "torch.so",
                "torch/",
                "evil.pth",
                "x.egg",
                "apps.cpython-311-x86_64-linux-gnu.so",
                "APPS.PY",
                "apps.py",
                "sitecustomize.py",
                ".env",
                "README.md",
                "__pycache__/apps.cpython-311.pyc",
                "../apps.py",
                "/etc/x",
                "pyproject.toml",
                ".info/x",
            )
        ),
        bundle(**{"apps.py": APPS + "import os\n"}),
        bundle(**{"apps.py": None}),
        bundle(LICENSE="import os"),
        bundle(**{MANIFEST: None}),
        bundle(**{MANIFEST: ""}),
        bundle(**{MANIFEST: "apps.py,0,0"}),
        bundle(**{MANIFEST: LISTED.replace("apps.py", "/etc/hostname")}),
        bundle(**{MANIFEST: LISTED + f"\n/etc/hostname,{'0' * 64},1"}),
        bundle(**{MANIFEST: LISTED + "\n/dev/zero,0,0"}),
        bundle(**{MANIFEST: LISTED + "\n" + LISTED}),
        bundle(**{MANIFEST: "0" * (UNPACKED_BYTES + 1)}),  # unfolds
        bundle(**{MANIFEST: random.Random(0).randbytes(BUNDLE_BYTES).hex()}),
        bundle(**{"pyproject.toml": app_config("fewbytes.cli.app:main", "apps:client", {})}),
        bundle(**{"pyproject.toml": CONFIG.replace("hatchling.build", "evil.build")}),
        bundle(**{"pyproject.toml": CONFIG.replace('"fewbytes"', '"evil @ file:///tmp/evil"', 1)}),
        bundle(**{"pyproject.toml": CONFIG + "[tool.other]\n"}),
        bundle(**{"pyproject.toml": CONFIG.replace("config]", "other]")}),
        bundle(**{"pyproject.toml": "rounds = "}),
        b"",
        b"PK",
        bundle()[:-30],
    ],
)
def test_a_node_takes_the_installed_application_and_no_other(hostile):
    assert is_installed(bundle())
    assert not is_installed(hostile)


def test_a_bundle_of_many_files_that_unfold_is_refused_before_any_is_unpacked():
    unfolding = bundle(*((f"{i}.py", "0" * (1 << 20)) for i in range(150)))
    assert len(unfolding) < BUNDLE_BYTES
    tracemalloc.start()
    try:
        assert not is_installed(unfolding)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_what_flower_makes_of_the_application_is_taken():
    from flwr.cli.build import build_fab_from_files

    files = {name: text.encode() for name, text in application_files({"rounds": 3, "method": "fedavg"}).items()}
    packed, _ = build_fab_from_files(files)
    assert is_installed(packed)
    described = tomllib.loads(files["pyproject.toml"].decode())
    project, publisher = described["project"], described["tool"]["flwr"]["app"]["publisher"]
    assert f"{publisher}/{project['name']} {project['version']}" == APPLICATION


@pytest.mark.parametrize(
    ("client", "path", "open_to_it"),
    [
        ("127.0.0.1", "/v1/control/start-run", True),
        ("::1", "/v1/control/start-run", True),
        ("::ffff:127.0.0.1", "/v1/control/start-run", True),
        ("192.0.2.7", "/v1/control/start-run", False),
        ("192.0.2.7", "/v1/runtime/acquire-task", False),
        ("192.0.2.7", "/v1/fleet", False),
        ("localhost", "/v1/control/start-run", False),
        ("192.0.2.7", "/v1/fleet/pull-messages", True),
        ("127.0.0.1", "/v1/runtime/acquire-task", True),
        ("192.0.2.7", "/openapi.json", False),
    ],
)
def test_the_gate_opens_to_other_machines_for_nodes_alone(client, path, open_to_it):
    reached, sent = [], []

    async def within(scope, receive, send):
        reached.append(scope["path"])

    async def send(event):
        sent.append(event)

    scope = {"type": "http", "path": path, "client": (client, 1), "headers": []}
    asyncio.run(Gate(within, requests.FLEET, lambda scope: False)(scope, None, send))
    assert reached == ([path] if open_to_it else [])
    assert [event["status"] for event in sent if "status" in event] == ([] if open_to_it else [403])


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc", "/health", "/", "/v1", ""])
def test_what_asks_for_no_key_is_shut_on_the_machine_itself(path):
    reached, sent = [], []

    async def within(scope, receive, send):
        reached.append(scope["path"])

    async def send(event):
        sent.append(event)

    scope = {"type": "http", "path": path, "client": ("127.0.0.1", 1), "headers": []}
    asyncio.run(Gate(within, requests.FLEET, lambda scope: True)(scope, None, send))
    assert not reached
    assert [event["status"] for event in sent if "status" in event] == [404]


@pytest.mark.parametrize(
    ("header", "strangers", "nodes"),
    [
        ((b"content-length", b"0"), [], []),
        ((b"content-length", b"65536"), [], []),
        ((b"content-length", b"65537"), [401], []),
        ((b"content-length", b"67108864"), [401], []),
        ((b"content-length", b"67108865"), [413], [413]),
        ((b"content-length", b"-1"), [413], [413]),
        ((b"transfer-encoding", b"chunked"), [413], [413]),
    ],
)
def test_much_is_read_of_nodes_alone_and_from_nobody_without_end(header, strangers, nodes):
    for known, wanted in ((False, strangers), (True, nodes)):
        reached, sent = [], []

        async def within(scope, receive, send, reached=reached):
            reached.append(scope["path"])

        async def send(event, sent=sent):
            sent.append(event)

        scope = {"type": "http", "path": "/v1/fleet/push-object", "client": ("192.0.2.7", 1), "headers": [header]}
        asyncio.run(Gate(within, requests.FLEET, lambda scope, known=known: known)(scope, None, send))
        assert [event["status"] for event in sent if "status" in event] == wanted
        assert len(reached) == (not wanted)


def test_the_token_is_known_or_not():
    assert knows(b"secret", "secret")
    for said in (None, "", "secre", "secret ", b"x"):
        assert not knows(b"secret", said)
    assert not knows(b"", "")


def test_of_a_database_that_is_purged_the_nodes_stay(tmp_path):
    path = tmp_path / files.DATABASE
    with closing(sqlite3.connect(path)) as there:
        there.execute("create table node (id)")
        there.execute("create table objects (content)")
        there.execute("insert into node values (7)")
        there.execute("insert into objects values (?)", (b"an upload " * 1000,))
        there.commit()
    files.purge(path)
    assert b"an upload" not in path.read_bytes()
    with closing(sqlite3.connect(path)) as there:
        assert there.execute("select id from node").fetchall() == [(7,)]
        assert there.execute("select count(*) from objects").fetchone() == (0,)
    files.purge(tmp_path / "none")  # which is none


def test_what_a_run_and_its_nodes_keep_is_their_owners_alone(tmp_path):
    app = client_app(CASES["fedpurin"], task_of("fedpurin"), tmp_path / "nodes")
    folder = tmp_path / "server" / "run"
    run("fedpurin", folder, grid=MemoryGrid(app, CLIENTS), keep_frames=True)
    private = [folder / "checkpoint", folder / "frames", tmp_path / "nodes" / "run"]
    private += [tmp_path / "nodes" / "run" / "checkpoint", tmp_path / "nodes" / "run" / "models"]
    for place in private:
        assert place.stat().st_mode & 0o777 == 0o700, place
        for file in place.iterdir():
            assert file.is_dir() or file.name.endswith("lock") or not file.stat().st_mode & 0o077, file
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
    assert (folder / "result.json").stat().st_mode & 0o077  # to be shared
