"""What `fewbytes.flower.compat` takes for granted of Flower, thing by thing: a new version that breaks one fails here.

What `flwr supernode register` and `flwr run` answer is looked at in tests/process/test_deployment.py, on real ones.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import flwr
import httpx
import pytest
import typer

from fewbytes.base.errors import UserError
from fewbytes.flower import compat

FLOWER = f"flwr {version('flwr')}"
NODE_CONFIG = {
    "partition-id": 3, "a": "x y", "b": "it's", "c": 'say "x"', "d": "C:\\new\\it's", "e": "k=v.toml", "f.g": "",
}  # fmt: skip


def of_flower(module: str, name: str) -> object:
    """A private thing of Flower's; the test fails in one line if it is gone."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(f"{FLOWER} has no {module}.{name}: see fewbytes.flower.compat")


def test_the_requirement_is_the_packages():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert compat.REQUIREMENT in project["dependencies"]


@pytest.mark.parametrize("name", [*compat.ENVIRONMENT, compat.HOME])
def test_environment_variables_are_read(name):
    sources = Path(flwr.__file__).parent.rglob("*.py")
    assert any(f'"{name}"' in path.read_text() for path in sources), f"{FLOWER} does not read {name}"


@pytest.mark.process
def test_the_package_keeps_flower_quiet():
    code = "import fewbytes.flower.apps, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "0\n", f"{FLOWER} is not kept quiet"


def test_the_logger_is_flowers():
    logger = of_flower("flwr.common.logger", "FLOWER_LOGGER")
    assert logger is logging.getLogger(compat.LOGGER), f"{FLOWER} logs as {logger.name}"


def test_replies_are_looked_for_often():
    compat.look_often()
    pull = of_flower("flwr.supercore.inflatable.inflatable_utils", "pull_objects")
    names = ("initial_backoff", "backoff_cap")
    found = {name: (pull.__kwdefaults__ or {}).get(name) for name in names}
    assert found == dict.fromkeys(names, compat.LOOK_SECONDS), f"{FLOWER}: pull_objects waits by other names"
    for module in ("flwr.superlink.grid.http_grid", "flwr.supernode.start_client_internal"):
        assert of_flower(module, "pull_objects") is pull, f"{FLOWER}: {module} fetches otherwise"


def test_a_node_that_is_gone_has_its_error_code():
    codes = of_flower("flwr.common.constant", "ErrorCode")
    assert getattr(codes, "NODE_UNAVAILABLE", None) == compat.NODE_UNAVAILABLE, f"{FLOWER} has other error codes"


def test_nodes_have_ids_and_names():
    info = of_flower("flwr.proto.node_pb2", "NodeInfo")

    class Grid:
        def get_nodes(self):
            return [info(node_id=7, name="hospital"), info(node_id=8)]

    assert compat.connected_nodes(Grid()) == {7: "hospital", 8: ""}
    assert "NodeInfo" in str(inspect.signature(flwr.serverapp.Grid.get_nodes)), f"{FLOWER}: nodes are something else"


def test_the_superlink_takes_its_options(tmp_path):
    database, token = tmp_path / compat.DATABASE, tmp_path / "token"
    program, *start, kind, secret = compat.superlink_command("127.0.0.1", 9092, tmp_path, database, token)[:5]
    assert (program, start, kind, secret) == (sys.executable, [*compat.GUARDED], "superlink", str(token))
    options = compat.superlink_command("127.0.0.1", 9092, tmp_path, database, token)[5:]
    taken = of_flower("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink")().parse_args(options)
    assert taken.host == "127.0.0.1"
    assert taken.port == 9092
    assert taken.database == str(tmp_path / compat.DATABASE)
    assert taken.enable_supernode_auth


def test_a_supernode_takes_its_options_and_configuration(tmp_path):
    program, *options = compat.supernode_command("link:443", 9100, tmp_path / "ca", tmp_path / "key", NODE_CONFIG)
    assert program in compat.COMMANDS
    guarded = compat.supernode_command("link:443", 9100, tmp_path / "ca", tmp_path / "key", NODE_CONFIG, "python3")
    assert guarded == ["python3", *compat.GUARDED, "supernode", *options]
    taken = of_flower("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode")().parse_args(options)
    assert taken.superlink == "link:443"
    assert taken.port == 9100
    assert taken.root_certificates == str(tmp_path / "ca")
    assert taken.auth_supernode_private_key == str(tmp_path / "key")
    parsed = of_flower("flwr.common.config", "parse_config_args")([taken.node_config])
    assert parsed == NODE_CONFIG, f"{FLOWER} reads a node's configuration otherwise"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flwr.superlink.cli.flower_superlink", "_get_superexec_command"),
        ("flwr.superlink.cli.flower_superlink", "load_control_authn_plugin"),
        ("flwr.superlink.extensions", "get_middleware"),
        ("flwr.supernode.start_client_internal", "_pull_and_store_message"),
        ("flwr.supernode.start_client_internal", "_verify_fab"),
        ("flwr.supernode.fleet_http_connection", "make_simple_http_retry_invoker"),
    ],
)
def test_what_is_guarded_is_there(module, name):
    assert callable(of_flower(module, name))


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
        assert compat.bearing_bad_links(invoker).invoke(call) == "heard"
    else:
        with pytest.raises(httpx.ConnectError):
            compat.bearing_bad_links(invoker).invoke(call)
    assert len(tries) == tried


def test_flwr_shows_the_token(tmp_path):
    name, text = compat.credentials("127.0.0.1:9092", "secret")
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
        compat.supernode_command("link:443", 9100, tmp_path, tmp_path, config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's command line is not of the newest typer's style
@pytest.mark.parametrize(
    "command",
    [
        compat.register_command(Path("a.pub"), "hospital"),
        compat.list_nodes_command(),
        compat.submit_command(Path("app")),
        compat.run_status_command(3),
        compat.stop_command(3),
    ],
    ids=" ".join,
)
def test_flwr_takes_its_commands(command):
    program, *arguments = compat.in_json(command)
    assert program in compat.COMMANDS
    at = typer.main.get_command(of_flower("flwr.cli.app", "app"))
    while hasattr(at, "commands"):
        name, *arguments = arguments
        assert name in at.commands, f"{FLOWER} has no command {name}"
        at = at.commands[name]
    taken = at.make_context(program, arguments).params
    assert "json" in taken.values()
    assert compat.CONNECTION in taken.values()


def test_flwr_finds_the_superlink(tmp_path, monkeypatch):
    monkeypatch.setenv(compat.HOME, str(tmp_path))
    name, text = compat.connection_config("127.0.0.1:9092", tmp_path / "ca.crt")
    (tmp_path / name).write_text(text)
    read = of_flower("flwr.cli.flower_config", "read_superlink_connection")
    for connection in (read(), read(compat.CONNECTION)):
        assert connection.address == "127.0.0.1:9092"
        assert connection.root_certificates == str(tmp_path / "ca.crt")


def test_the_app_is_one_of_flowers(tmp_path):
    (tmp_path / "LICENSE").write_text("x")
    (tmp_path / "pyproject.toml").write_text(compat.app_config("a:server", "a:client", {"method": "fedavg", "a.b": 1}))
    check = of_flower("flwr.cli.config_utils", "load_and_validate")
    config, warnings = check(tmp_path / "pyproject.toml", check_module=False)
    assert not warnings, f"{FLOWER}: {warnings}"
    assert config["tool"]["flwr"]["app"]["components"] == {"serverapp": "a:server", "clientapp": "a:client"}


def test_the_list_of_nodes_is_read():
    listed = of_flower("flwr.cli.supernode.ls", "_to_json")
    status = of_flower("flwr.supercore.constant", "NodeStatus")
    kinds = (status.REGISTERED, status.ONLINE, status.OFFLINE, status.UNREGISTERED)
    text = listed([(i, "me", kind, "", "", "", "", 0.0) for i, kind in enumerate(kinds)], verbose=False)
    answer = compat.read_answer(b"Loading ...\n" + text.encode())
    assert compat.failure(answer) == ""
    assert compat.node_statuses(answer) == {"0": "registered", "1": "online", "2": "offline"}


@pytest.mark.parametrize("details", ["N/A", "it broke"])
def test_a_runs_status_is_read(details):
    row, status = of_flower("flwr.cli.run_utils", "RunRow"), of_flower("flwr.common.constant", "Status")
    values = {f.name: 0 for f in fields(row)} | {"fab_id": "a/b", "details": details}
    text = of_flower("flwr.cli.ls", "_to_json")([row(**values | {"status_text": f"{status.FINISHED}:failed"})])
    read = compat.run_status(compat.read_answer(text.encode()))
    assert read == ("finished:failed", details.replace("N/A", ""))


def test_a_failure_is_read_in_one_line():
    boxed = "Loading project configuration...\n╭─ Error ─╮\n│ No such run. │\n╰────╯".encode()
    assert "No such run." in compat.failure(compat.read_answer(b"\x1b[31m" + boxed))
    known = of_flower("flwr.common.constant", "PUBLIC_KEY_ALREADY_IN_USE_MESSAGE")
    assert compat.ALREADY_REGISTERED in known, f"{FLOWER} says it otherwise: {known}"


def test_the_last_words_of_a_log():
    log = b"INFO : starting\n\x1b[91mERROR\x1b[0m : no route\nINFO : bye\n"
    assert compat.last_words(log) == "ERROR : no route"
    assert compat.last_words(b"one\ntwo\n") == "two"
    assert compat.last_words(b"") == "it said nothing"


@pytest.mark.process
def test_the_last_words_of_a_process_are_its_exit_message():
    code = "from flwr.supercore.exit import flwr_exit; flwr_exit(200, 'the port is taken')"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, check=False)
    assert compat.last_words(ended.stdout).startswith("the port is taken"), f"{FLOWER} exits with other words"
