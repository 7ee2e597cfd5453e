"""An ordinary Flower app as it is, and with fewbytes in two changed lines: accuracy and bytes each way.

    python benchmarks/flower/any_app.py --app quickstart-pytorch --images 5000 --rounds 12

`--app` is a folder with Flower's own template of that name (`flwr new @flwrlabs/quickstart-pytorch`). A copy of it is
run by `flwr run`, in Flower's simulation or with `--deployment` over TLS, changed as its user would change it. Its data
set is read from FEWBYTES_DATA, the first `--images` of its training images, so that nothing is downloaded. Bytes are
those of arrays in messages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from fewbytes.flower.certificates import write_certificates

VARIANTS: dict[str, tuple[str, str] | None] = {  # what the client's and the server's line say
    "the app as it is": None,
    "lossless": ("", ""),
    "up 0.5 bits": ("0.5", ""),
    "up 0.5, down 1 bit": ("0.5", "bits=1, "),
    "up 0.5, down 1 bit, `first`": ("0.5, first=first", "bits=1, first=first, "),
    "up 0.5, down 0.5 bits": ("0.5", "bits=0.5, "),
}
FIRST = """def first():
    with torch.random.fork_rng():
        torch.manual_seed({seed})
        return Net().state_dict()


"""
"""What the client's and the server's file then define; the server starts from it."""
LOCAL_DATA = """
import os, datasets
_root = os.environ["FEWBYTES_DATA"] + "/cifar10/"
def _load(path=None, name=None, split=None, **_):
    files = {part: f"{_root}{part}-00000-of-00001.parquet" for part in ("train", "test")}
    rows = {"train": int(os.environ["IMAGES"]), "test": 2000}
    made = {part: datasets.Dataset.from_parquet(file, cache_dir=os.environ["CACHE"]).select(range(rows[part]))
            for part, file in files.items()}
    made = {part: data.rename_columns({k: "img" for k in ("image",) if k in data.column_names})
            for part, data in made.items()}
    return made[split] if split else datasets.DatasetDict(made)
datasets.load_dataset = _load
"""
"""Runs in each of Flower's processes: the data set comes from a folder."""


def changed(app: Path, to: Path, up_down: tuple[str, str] | None, out: Path, seed: int) -> None:
    """A copy of the app with its two lines changed; as it is, with a grid that counts and encodes nothing. `seed`: of
    the first weights, where both ends make them."""
    shutil.copytree(app, to, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "LICENSE").touch()
    package = next(to.glob("*/server_app.py")).parent
    client, server = package / "client_app.py", package / "server_app.py"
    if up_down is None:
        _change(
            server,
            "app = ServerApp()",
            f"app = compressed(ServerApp(), out={str(out)!r})",
            "few_grid import compressed",
        )
        return
    up, down = up_down
    before = FIRST.format(seed=seed) if "first" in up else ""
    mod = f"{before}app = ClientApp(mods=[fewbytes_mod({up})])"
    _change(client, "app = ClientApp()", mod, "mod import fewbytes_mod")
    grid = f"{before}app = compressed(ServerApp(), {down}out={str(out)!r})"
    _change(server, "app = ServerApp()", grid, "few_grid import compressed")
    if before:
        text, line = server.read_text(), "    global_model = Net()\n"
        assert text.count(line) == 1, f"{server} makes its model in another way"
        server.write_text(text.replace(line, f"{line}    global_model.load_state_dict(first())\n"))


def _change(file: Path, line: str, new: str, imported: str) -> None:
    text = file.read_text()
    assert text.count(line) == 1, f"{file} has not one line {line!r}"
    file.write_text(text.replace(line, f"from fewbytes.flower.{imported}\n\n{new}"))


def run(given: argparse.Namespace, place: Path, config: str, up_down: tuple[str, str] | None, seed: int) -> list[float]:
    """Run a variant, in Flower's simulation or deployed; returns its last accuracy, and MB up and down."""
    clients = given.clients
    changed(given.app, place / "app", up_down, place / "out", seed)
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(LOCAL_DATA)
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(place / "site"), os.environ.get("PYTHONPATH", "")]),
        "FLWR_HOME": str(place / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "IMAGES": str(given.images), "CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    flwr = f"{programs}/flwr"
    try:
        if given.deployment:
            start_deployment(place, programs, environment, clients)
            where = ["tls"]
        else:
            where = ["local", "--federation-config", f"num-supernodes={clients} client-resources-num-cpus=1"]
        command = [flwr, "run", str(place / "app"), *where, "--run-config", config, "--stream"]
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=3600)
    finally:
        end_started(environment["FLWR_HOME"])
    found = re.findall(r"'accuracy': '?([0-9.e+-]+)", done.stdout + done.stderr)
    if not found:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    rows = [json.loads(line) for line in (place / "out" / "bytes.jsonl").read_text().splitlines()]
    return [float(found[-1]), *(sum(row["bytes"] for row in rows if row["way"] == way) / 1e6 for way in ("up", "down"))]


def start_deployment(place: Path, programs: str, environment: dict[str, str], clients: int) -> None:
    """Start Flower's SuperLink with TLS, and a SuperNode for each client, on this machine."""
    write_certificates(place / "certificates", [])
    keys, port = place / "certificates", free_port()
    (place / "home").mkdir()
    (place / "home" / "config.toml").write_text(
        f'[superlink.tls]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{keys}/ca.crt"\n'
    )
    superlink = [
        f"{programs}/flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--ssl-ca-certfile",
        f"{keys}/ca.crt", "--ssl-certfile", f"{keys}/server.pem", "--ssl-keyfile", f"{keys}/server.key",
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    log = (place / "log").open("ab")
    subprocess.Popen(superlink, env=environment, cwd=place, stdout=log, stderr=log)
    time.sleep(10)
    for client in range(clients):
        node = [
            f"{programs}/flower-supernode", "--root-certificates", f"{keys}/ca.crt", "--superlink",
            f"127.0.0.1:{port}", "--port", str(free_port()),
            "--node-config", f"partition-id={client} num-partitions={clients}",
        ]  # fmt: skip
        subprocess.Popen(node, env=environment, cwd=place, stdout=log, stderr=log)
    time.sleep(10)


def free_port() -> int:
    """A port of this machine that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_started(home: str) -> None:
    """End all of Flower's processes of a run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME") == home:
                process.kill()


def main() -> None:
    """Print the table, a row a variant, as means over the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--deployment", action="store_true", help="A SuperLink and SuperNodes over TLS, no simulation.")
    given = parser.parse_args()
    config = f"num-server-rounds={given.rounds} fraction-evaluate=1.0 local-epochs=1 learning-rate=0.02 batch-size=16"
    heads = "| | accuracy | MB up | MB down | MB both | times fewer bytes than the app as it is, both |"
    print(f"{heads}\n{'| --- ' * 6}|", flush=True)
    first = 0.0
    for name in given.variants:
        values = []
        for seed in range(given.runs):
            with tempfile.TemporaryDirectory() as place:
                values.append(run(given, Path(place), config, VARIANTS[name], seed))
        accuracy, up, down = map(statistics.mean, zip(*values, strict=True))
        spread = statistics.stdev(value[0] for value in values) if given.runs > 1 else 0.0
        both = up + down
        first = first or both
        moved = f"{up:.2f} | {down:.2f} | {both:.2f} | {first / both:.3g}"
        print(f"| {name} | {100 * accuracy:.1f} ± {100 * spread:.1f} % | {moved} |", flush=True)


if __name__ == "__main__":
    main()
