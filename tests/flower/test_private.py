"""What `fewbytes.flower.private` takes for granted of Flower, thing by thing: a new version that breaks one fails here.

What `flwr supernode register` and `flwr run` answer is looked at in tests/process/test_deployment.py, on real ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
import socket
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import flwr
import httpx
import pytest
import typer
from flwr.app import ConfigRecord, Error, Message, RecordDict
from modules import DOCUMENTED, MODULES, PRIVATE, parts_of, private_parts

from fewbytes.base.errors import UserError
from fewbytes.flower import application, fleet
from fewbytes.flower.long_polling import HOLD_SECONDS
from fewbytes.flower.private import calls, cli, errors, files, grid, programs, ray_cluster, requests
from fewbytes.flower.private.supernode import retrying_more

FLOWER = f"flwr {version('flwr')}"
RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: no simulation")
PARTS = sorted(set().union(*(private_parts(each) for each in MODULES if each.startswith(PRIVATE))))
NODE_CONFIG = {
    "partition-id": 3, "a": "x y", "b": "it's", "c": 'say "x"', "d": "C:\\new\\it's", "e": "k=v.toml", "f.g": "",
}  # fmt: skip


def of_flower(module: str, name: str) -> object:
    """A private thing of Flower's; the test fails in one line if it is gone."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(f"{FLOWER} has no {module}.{name}: see docs/flower-private.md")


def test_the_requirement_is_the_packages():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert application.REQUIREMENT in project["optional-dependencies"]["flower"]


@pytest.mark.parametrize("name", [*programs.ENVIRONMENT, programs.HOME])
def test_environment_variables_are_read(name):
    sources = Path(flwr.__file__).parent.rglob("*.py")
    assert any(f'"{name}"' in path.read_text() for path in sources), f"{FLOWER} does not read {name}"


def test_the_package_keeps_flower_quiet():
    code = "import fewbytes.flower.apps, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "0\n", f"{FLOWER} is not kept quiet"


def test_the_logger_is_flowers():
    logger = of_flower("flwr.common.logger", "FLOWER_LOGGER")
    assert logger is logging.getLogger(programs.LOGGER), f"{FLOWER} logs as {logger.name}"


def test_replies_are_looked_for_often_and_as_long_as_it_takes():
    grid.look_often()
    pull = of_flower("flwr.supercore.inflatable.inflatable_utils", "pull_objects")
    wanted = {"initial_backoff": grid.LOOK_SECONDS, "backoff_cap": grid.LOOK_SECONDS, "max_tries_per_object": None}
    found = {name: (pull.__kwdefaults__ or {}).get(name, "nothing") for name in wanted}
    assert found == wanted, f"{FLOWER}: pull_objects waits by other names"
    for module in ("flwr.superlink.grid.http_grid", "flwr.supernode.start_client_internal"):
        assert of_flower(module, "pull_objects") is pull, f"{FLOWER}: {module} fetches otherwise"


def test_nodes_have_ids_and_names():
    info = of_flower("flwr.proto.node_pb2", "NodeInfo")

    class Grid:
        def get_nodes(self):
            return [info(node_id=7, name="hospital"), info(node_id=8)]

    assert grid.connected_nodes(Grid()) == {7: "hospital", 8: ""}
    assert "NodeInfo" in str(inspect.signature(flwr.serverapp.Grid.get_nodes)), f"{FLOWER}: nodes are something else"


def test_the_superlink_takes_its_options(tmp_path):
    local = programs.Local(tmp_path / "token", "localhost:9092", tmp_path / "local.pem")
    command = programs.superlink_command("127.0.0.1", 9092, tmp_path, tmp_path / files.DATABASE, local)
    start, options = command[:6], command[6:]
    assert start == [sys.executable, *programs.GUARDED, "superlink", str(local.token), "localhost:9092"]
    taken = of_flower("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink")().parse_args(options)
    assert taken.host == "127.0.0.1"
    assert taken.port == 9092
    assert taken.database == str(tmp_path / files.DATABASE)
    assert taken.ssl_ca_certfile == str(local.ca)
    assert taken.enable_supernode_auth


@pytest.mark.parametrize("name", ["sql_corestate", "in_memory_corestate"])
def test_the_superlink_is_patient_with_a_runs_server(name):
    """Which it starts again where the claim of the first has expired."""
    code = (
        "import inspect; from fewbytes.flower.private import superlink; superlink.be_patient(); "
        f"from flwr.supercore.corestate import {name} as state; print(state.HEARTBEAT_DEFAULT_INTERVAL); "
        "print(inspect.getsource(state).split('def claim_task')[1].split('    def ')[0])"
    )
    if importlib.util.find_spec("flwr.supercore.corestate") is None:
        pytest.skip(f"{FLOWER} has its own patience")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0] == "180"
    assert "seconds=HEARTBEAT_DEFAULT_INTERVAL" in said, f"{FLOWER}: a claim lasts otherwise"


def test_a_supernode_takes_its_options_and_configuration(tmp_path):
    program, *options = programs.supernode_command("link:443", 9100, tmp_path / "ca", tmp_path / "key", NODE_CONFIG)
    assert program in programs.COMMANDS
    guarded = programs.supernode_command("link:443", 9100, tmp_path / "ca", tmp_path / "key", NODE_CONFIG, "python3")
    assert guarded == ["python3", *programs.GUARDED, "supernode", *options]
    taken = of_flower("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode")().parse_args(options)
    assert taken.superlink == "link:443"
    assert taken.port == 9100
    assert taken.root_certificates == str(tmp_path / "ca")
    assert taken.auth_supernode_private_key == str(tmp_path / "key")
    parsed = of_flower("flwr.common.config", "parse_config_args")([taken.node_config])
    assert parsed == NODE_CONFIG, f"{FLOWER} reads a node's configuration otherwise"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's command line is not of the newest typer's style
@pytest.mark.parametrize("part", [each for each in PARTS if each.startswith("flwr.")])
def test_every_private_part_is_there(part):
    if "ray" in part:
        pytest.importorskip("ray", reason="Ray is not installed: no simulation")
    module, _, name = part.rpartition(".")
    of_flower(module, name)


def test_what_else_the_package_uses_is_documented():
    for module in {each for each in MODULES if not each.startswith(PRIVATE)}:
        for part in parts_of(MODULES[module]):
            of, _, name = part.rpartition(".")
            if of in DOCUMENTED:
                assert name in importlib.import_module(of).__all__, f"{FLOWER}: {module} uses {part}"


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (httpx.ReadError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol"), 2),
        (httpx.WriteError("[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed or bad record mac"), 2),
        (httpx.ReadTimeout("The read operation timed out"), 2),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get issuer"), 1),
    ],
)
def test_a_node_tries_again_where_the_link_failed_and_not_where_the_certificate_is_wrong(error, tried):
    tries = []

    def call():
        tries.append(1)
        if len(tries) == 1:
            raise error
        return "heard"

    invoker = of_flower("flwr.supernode.fleet_http_connection", "make_simple_http_retry_invoker")()
    invoker.wait_function = lambda seconds: None
    if tried == 2:
        assert retrying_more(invoker).invoke(call) == "heard"
    else:
        with pytest.raises(httpx.ConnectError):
            retrying_more(invoker).invoke(call)
    assert len(tries) == tried


def test_flwr_shows_the_token(tmp_path):
    name, text = files.credentials("127.0.0.1:9092", "secret")
    (tmp_path / name).write_text(text)
    store = of_flower("flwr.supercore.credential_store.file_credential_store", "FileCredentialStore")(tmp_path / name)
    kind = of_flower("flwr.cli.auth_plugin.oidc_cli_plugin", "OidcCliPlugin")
    plugin = kind("127.0.0.1:9092")
    plugin.store = store
    plugin.load_tokens()
    key = of_flower("flwr.common.constant", "ACCESS_TOKEN_KEY")
    assert dict(plugin.write_tokens_to_metadata([]))[key] == "secret", f"{FLOWER} keeps tokens otherwise"


@pytest.mark.parametrize("config", [{"a": "'\""}, {"a": "x\ny"}, {"a b": "x"}])
def test_a_configuration_that_flower_cannot_take_is_refused(config, tmp_path):
    with pytest.raises(UserError, match="node configuration"):
        programs.supernode_command("link:443", 9100, tmp_path, tmp_path, config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's command line is not of the newest typer's style
@pytest.mark.parametrize(
    "command",
    [
        cli.register_command(Path("a.pub"), "hospital"),
        cli.list_nodes_command(),
        cli.unregister_command("3"),
        cli.submit_command(Path("app")),
        cli.run_status_command(3),
        cli.stop_command(3),
    ],
    ids=" ".join,
)
def test_flwr_takes_its_commands(command):
    program, *arguments = cli.in_json(command)
    assert program in programs.COMMANDS
    at = typer.main.get_command(of_flower("flwr.cli.app", "app"))
    while hasattr(at, "commands"):
        name, *arguments = arguments
        assert name in at.commands, f"{FLOWER} has no command {name}"
        at = at.commands[name]
    taken = at.make_context(program, arguments).params
    assert "json" in taken.values()
    assert cli.CONNECTION in taken.values()


def test_flwr_finds_the_superlink(tmp_path, monkeypatch):
    monkeypatch.setenv(programs.HOME, str(tmp_path))
    name, text = files.connection_config("127.0.0.1:9092", tmp_path / "ca.crt")
    (tmp_path / name).write_text(text)
    read = of_flower("flwr.cli.flower_config", "read_superlink_connection")
    for connection in (read(), read(cli.CONNECTION)):
        assert connection.address == "127.0.0.1:9092"
        assert connection.root_certificates == str(tmp_path / "ca.crt")


def test_the_app_is_one_of_flowers(tmp_path):
    (tmp_path / "LICENSE").write_text("x")
    (tmp_path / "pyproject.toml").write_text(
        application.app_config("a:server", "a:client", {"method": "fedavg", "a.b": 1})
    )
    check = of_flower("flwr.cli.config_utils", "load_and_validate")
    read, warnings = check(tmp_path / "pyproject.toml", check_module=False)
    assert not warnings, f"{FLOWER}: {warnings}"
    assert read["tool"]["flwr"]["app"]["components"] == {"serverapp": "a:server", "clientapp": "a:client"}


def test_the_list_of_nodes_is_read(monkeypatch, capfd):
    """With names and keys, as Flower's own command lists neither."""
    info, status = of_flower("flwr.proto.node_pb2", "NodeInfo"), of_flower("flwr.supercore.constant", "NodeStatus")
    kinds = (status.REGISTERED, status.ONLINE, status.OFFLINE, status.UNREGISTERED)
    nodes = [info(node_id=i, name=f"n{i}", public_key=b"a key", status=kind) for i, kind in enumerate(kinds)]
    answer = of_flower("flwr.proto.control_pb2", "ListNodesResponse")(nodes_info=nodes)
    client = SimpleNamespace(ListNodes=lambda request: answer, close=lambda: None)
    monkeypatch.setattr("flwr.cli.flower_config.read_superlink_connection", lambda name: name)
    monkeypatch.setattr("flwr.cli.utils.init_http_client_from_connection", lambda connection: client)
    cli.flwr_commands()(cli.in_json(cli.list_nodes_command())[1:])
    read = cli.read_answer(b"Loading ...\n" + capfd.readouterr().out.encode())
    assert cli.failure(read) == ""
    assert cli.registered(read) == [
        ("0", "n0", "a key", "registered"), ("1", "n1", "a key", "online"), ("2", "n2", "a key", "offline"),
    ]  # fmt: skip
    monkeypatch.setattr("flwr.cli.utils.init_http_client_from_connection", lambda connection: 1 / 0)
    cli.flwr_commands()(cli.in_json(cli.list_nodes_command())[1:])
    assert cli.failure(cli.read_answer(capfd.readouterr().out.encode())) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("details", ["N/A", "it broke"])
def test_a_runs_status_is_read(details):
    row, status = of_flower("flwr.cli.run_utils", "RunRow"), of_flower("flwr.common.constant", "Status")
    values = {f.name: 0 for f in fields(row)} | {"fab_id": "a/b", "details": details}
    text = of_flower("flwr.cli.ls", "_to_json")([row(**values | {"status_text": f"{status.FINISHED}:failed"})])
    read = cli.run_status(cli.read_answer(text.encode()))
    assert read == ("finished:failed", details.replace("N/A", ""))


def test_a_failure_is_read_in_one_line():
    boxed = "Loading project configuration...\n╭─ Error ─╮\n│ No such run. │\n╰────╯".encode()
    assert "No such run." in cli.failure(cli.read_answer(b"\x1b[31m" + boxed))
    known = of_flower("flwr.common.constant", "PUBLIC_KEY_ALREADY_IN_USE_MESSAGE")
    assert cli.ALREADY_REGISTERED in known, f"{FLOWER} says it otherwise: {known}"


def test_the_last_words_of_a_log():
    log = b"INFO : starting\n\x1b[91mERROR\x1b[0m : no route\nINFO : bye\n"
    assert programs.last_words(log) == "ERROR : no route"
    assert programs.last_words(b"one\ntwo\n") == "two"
    assert programs.last_words(b"") == "it said nothing"


def test_the_last_words_of_a_process_are_its_exit_message():
    code = "from flwr.supercore.exit import flwr_exit; flwr_exit(200, 'the port is taken')"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, check=False)
    assert programs.last_words(ended.stdout).startswith("the port is taken"), f"{FLOWER} exits with other words"


# ------------------------------------------------------------------------------------ what a resident node speaks


def routes() -> dict[str, str]:
    """What the SuperLink serves its nodes: method by path."""
    router = of_flower("flwr.superlink.routers.fleet.router", "router")
    return {route.path: next(iter(route.methods)) for route in router.routes}


@pytest.mark.parametrize("path", [requests.ASKED, requests.CONFIRMED])
def test_nodes_ask_and_confirm_by_their_paths(path):
    assert path.startswith(requests.FLEET)
    assert routes().get(path) == "POST", f"{FLOWER} has no {path}"


def test_a_run_leaves_messages_by_its_path():
    kinds = of_flower("flwr.supercore.protobuf.translation", "PROTOBUF_REQUEST_TYPES")
    kind = kinds.get(("POST", requests.LEFT))
    assert kind is of_flower("flwr.proto.runtime_pb2", "PushAppMessagesRequest"), f"{FLOWER} has no {requests.LEFT}"


def test_it_is_read_who_asks_for_which_message():
    node = of_flower("flwr.proto.node_pb2", "Node")(node_id=2**63 + 7)
    asks, message = (importlib.import_module(f"flwr.proto.{name}_pb2") for name in ("fleet", "message"))
    asked = asks.PullMessagesRequest(node=node).SerializeToString()
    assert requests.node_of(asked) == 2**63 + 7, f"{FLOWER}: a node asks in other words"
    confirms = message.ConfirmMessageReceivedRequest(node=node, run_id=3, message_object_id="ab")
    assert requests.confirmed(confirms.SerializeToString()) == (2**63 + 7, "ab")
    trees = [message.ObjectTree(object_id="ab")]
    answer = asks.PullMessagesResponse(messages_list=[message.Message()], message_object_trees=trees)
    assert requests.message_in(answer.SerializeToString()) == "ab", f"{FLOWER} gives messages in other words"
    assert requests.message_in(asks.PullMessagesResponse().SerializeToString()) == ""


def test_it_is_read_for_whom_messages_are_left():
    runtime, message = (importlib.import_module(f"flwr.proto.{name}_pb2") for name in ("runtime", "message"))
    left = [message.Message(metadata=message.Metadata(dst_node_id=node)) for node in (7, 8)]
    assert requests.nodes_for(runtime.PushAppMessagesRequest(messages_list=left).SerializeToString()) == [7, 8]


@pytest.mark.parametrize("read", [requests.node_of, requests.message_in, requests.confirmed, requests.nodes_for])
def test_what_is_no_request_of_flowers_is_refused(read):
    with pytest.raises(ValueError, match=r"(?i)pars"):
        read(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("ActivateNode", "activate-node"), ("DeactivateNode", "deactivate-node"),
        ("SendNodeHeartbeat", "send-node-heartbeat"), ("PullMessages", "pull-messages"),
        ("PushMessages", "push-messages"), ("PullObject", "pull-object"), ("PushObject", "push-object"),
        ("ConfirmMessageReceived", "confirm-message-received"), ("GetRun", "get-run"), ("GetFab", "get-fab"),
    ],
)  # fmt: skip
def test_a_resident_node_has_its_calls(call, path):
    client = of_flower("flwr.supernode.fleet_http_client", "FleetHttpClient")
    assert callable(getattr(client, call, None)), f"{FLOWER}: a node's connection has no {call}"
    assert f"{requests.FLEET}{path}" in routes(), f"{FLOWER} serves no {path}"


def test_a_node_may_ask_for_as_long_as_it_is_kept_waiting():
    of_client = inspect.signature(of_flower("flwr.supercore.protobuf.client", "ProtobufClient").__init__).parameters
    assert of_client["timeout"].default > HOLD_SECONDS + 5, f"{FLOWER}: a node waits for no answer so long"


def test_signs_of_life_are_taken_as_often_as_they_are_given():
    least, most, patience = (
        of_flower("flwr.common.constant", f"HEARTBEAT_{name}") for name in ("MIN_INTERVAL", "MAX_INTERVAL", "PATIENCE")
    )
    assert least <= fleet.ALIVE_SECONDS <= most, f"{FLOWER} takes no interval of {fleet.ALIVE_SECONDS} s"
    assert patience >= 2, f"{FLOWER} takes a node for gone at once"


@pytest.mark.parametrize(
    ("name", "status"),
    [("FLEET_RUN_STATUS_NOT_ALLOWED", 403), ("FLEET_GET_RUN_FAILED", 403), ("FLEET_NODE_ACTIVATION_FAILED", 412)],
)
def test_what_a_node_is_refused_with_has_its_status(name, status):
    catalog = of_flower("flwr.supercore.error.catalog", "API_ERROR_MAP")
    code = getattr(of_flower("flwr.supercore.error", "ApiErrorCode"), name, None)
    assert code in catalog, f"{FLOWER} has no {name}"
    assert catalog[code].http_status_code == status, f"{FLOWER} says {name} otherwise"


def test_why_a_node_is_refused_is_read():
    error = of_flower("flwr.supercore.error", "FlowerError")(7, "secret", "seen by all")
    read = type(error).from_json(json.dumps(error.to_json("in words")))
    assert (read.message, read.public_details) == ("in words", "seen by all"), f"{FLOWER} tells errors otherwise"


def test_a_message_travels_in_pieces_of_the_size_that_is_asked_for():
    name = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"
    code = (
        "from fewbytes.flower.messages import write_content\n"
        "from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects\n"
        "whole = get_all_nested_objects(write_content(b'', bytes(range(256)) * 10_000))\n"
        "print(max(len(each.deflate()) for each in whole.values()))"
    )
    environment = os.environ | programs.ENVIRONMENT
    longest = int(subprocess.check_output([sys.executable, "-c", code], text=True, env=environment))
    size = int(programs.ENVIRONMENT[name])
    assert size <= longest <= size + 1000, f"{FLOWER} does not heed {name}: a piece has {longest} bytes"


def message_and_reply(created: float) -> tuple[Message, Message]:
    """A message as it reaches a node, and the node's reply."""
    metadata = of_flower("flwr.app.metadata", "Metadata")
    make = of_flower("flwr.app.message.message", "make_message")
    about = metadata(
        run_id=3, message_id="m", src_node_id=1, dst_node_id=7, reply_to_message_id="", group_id="1",
        created_at=created, ttl=60.0, message_type="train",
    )  # fmt: skip
    message = make(metadata=about, content=RecordDict({"a": ConfigRecord({"b": b"x" * 99})}))
    return message, Message(RecordDict({"c": ConfigRecord({"d": b"y" * 99})}), reply_to=message)


def test_a_reply_is_the_same_when_it_is_made_again():
    """Its id is of what it says, so that the SuperLink knows what it has of it."""
    ids = set()
    for _ in range(2):
        message, reply = message_and_reply(created=1e9)
        sent = calls.taken_apart(reply, message)
        about = sent.head.metadata
        assert (about.created_at, about.ttl) == (1e9, 60.0), f"{FLOWER} keeps metadata otherwise"
        assert about.message_id == sent.tree.object_id
        ids.add(sent.tree.object_id)
    assert len(ids) == 1, f"{FLOWER}: a reply's id changes"


def test_a_message_is_taken_apart_and_put_together():
    whole = of_flower("flwr.supercore.inflatable.inflatable_utils", "pull_and_inflate_object_from_tree")
    message, reply = message_and_reply(created=1e9)
    _, tree, objects = calls.taken_apart(reply, message)
    contents = {name: each.deflate() for name, each in objects.items()}
    again = whole(
        tree, contents.__getitem__, lambda _: None, return_type=Message,
        max_tries_per_object=None, initial_backoff=0.1, backoff_cap=0.1,
    )  # fmt: skip
    assert again.content == reply.content, f"{FLOWER} puts messages together otherwise"


@pytest.mark.parametrize("kind", ["sql_corestate.SqlCoreState", "in_memory_corestate.InMemoryCoreState"])
def test_the_rest_of_a_reply_is_taken_of_who_no_longer_knows_its_session(kind):
    module, name = kind.split(".")
    source = inspect.getsource(of_flower(f"flwr.supercore.corestate.{module}", name).store_object)
    assert "if not session_id" in source, f"{FLOWER}: a reply whose node was started anew as it came is lost"


# ------------------------------------------------------------------------------------------------ the simulation


POOL = """
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
import ray
from fewbytes.flower.private.pool import lasting_pool

class Actor:
    def __init__(self):
        self.count = 0
    def run(self, app_fn, message, client, context):
        self.count += 1
        if message == "die":
            os._exit(1)
        return client, self.count, context

def send(message, client=""):
    function = lambda actor, *job: actor.run.remote(*job)
    return pool.fetch_result_and_return_actor_to_pool(pool.submit(function, (None, message, client, None)))[0]

def kill_idle_actors():
    for actor in pool.pool:
        ray.kill(actor)
        with suppress(ray.exceptions.RayActorError):
            while ray.get(actor.run.remote(None, "go", "", None)):
                pass  # it takes a moment

lasting_pool(4)
ray.init("local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
backend = import_module("flwr.server.superlink.fleet.vce.backend.raybackend")
pool = backend.BasicActorPool(ray.remote(Actor), {"num_cpus": 1}, {})
pool.add_actors_to_pool(pool.actors_capacity)
with ThreadPoolExecutor(pool.num_actors) as threads:
    assert len(list(threads.map(send, ["go"] * 20, map(str, range(20))))) == 20
print("actors", pool.num_actors)
while len(pool.pool) < 4:
    send("go")
kill_idle_actors()
print("of four that are dead:", send("go"))
try:
    send("die")
except ray.exceptions.RayActorError as error:
    print(type(error).__name__)
print("after that:", send("go") > 0, pool.num_actors)
ray.shutdown()
"""


@RAY
def test_a_simulations_pool_loses_no_message_with_an_actor():
    done = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True, timeout=120)
    said = [line for line in done.stdout.splitlines() if "raylet" not in line]
    wanted = ["actors 4", "of four that are dead: 1", "ActorDiedError", "after that: True 4"]
    assert said == wanted, f"{FLOWER}: {done.stderr}"


@RAY
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://head:10001", "ray_address .*'ray://head:10001': give host:port"),
        ("head", "ray_address .*'head': give host:port"),
        ("127.0.0.1:{port}", "127.0.0.1:{port}: give host:port"),
        ("no-such-host.invalid:6379", "no-such-host.invalid:6379"),
    ],
)
def test_where_no_ray_cluster_is_one_line_says_so(address, says, monkeypatch):
    monkeypatch.setattr(ray_cluster, "RAY_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UserError, match=says.format(port=port)):
            ray_cluster.ray_cluster(address.format(port=port))


def test_which_errors_say_that_a_node_is_away():
    from flwr.superlink.grid import http_grid

    broken_off = "Reply message objects are unavailable. The sender may not have completed the upload before …"
    words = [line.strip().strip('"') for line in inspect.getsource(http_grid).splitlines()]
    assert broken_off.partition(" The ")[2].startswith(
        words[words.index("Reply message objects are unavailable. The ") + 1]
    )
    assert errors.away(Error(3, broken_off)).startswith("its reply broke off")
    assert errors.away(Error(5, "Node Unavailable")).startswith("its node has gone")
    assert not errors.away(Error(3, "Message Unavailable - it could not be found in the database."))
    assert not errors.away(Error(2, "an error in its upload"))
