"""The language model of examples/08_language_model, as it is and with fewbytes: loss and bytes each way.

    python benchmarks/flower/language_model.py --rounds 10

Copies of the app that differ in its two lines are run by `flwr run`, in Flower's simulation. Bytes are those of arrays
in messages; the loss is the last round's, a mean over the clients' held-out texts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from any_app import end_started, free_port

APP = Path(__file__).resolve().parents[2] / "examples" / "08_language_model"
VARIANTS = {  # the client's mods, the server's bits
    "as it is": ("", "None"),
    "lossless": ("fewbytes_mod()", "None"),
    "1 bit up, 2 bits down": ("fewbytes_mod(bits=1)", "2"),
    "0.5 bits up, 1 bit down": ("fewbytes_mod(bits=0.5)", "1"),
}


def changed(to: Path, mods: str, bits: str, out: Path) -> None:
    """A copy of the app with other values in its two lines, which writes its bytes to `out`."""
    shutil.copytree(APP, to, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line, new in (
        ("client_app.py", "app = ClientApp(mods=[fewbytes_mod(bits=0.5)])", f"app = ClientApp(mods=[{mods}])"),
        ("server_app.py", "compressed(ServerApp(), bits=1)", f"compressed(ServerApp(), bits={bits}, out={str(out)!r})"),
    ):
        text = (to / "language_model" / file).read_text()
        assert text.count(line) == 1, f"{file} has not one line {line!r}"
        (to / "language_model" / file).write_text(text.replace(line, new))


def run(place: Path, mods: str, bits: str, clients: int, rounds: int, config: str) -> tuple[list[float], float, float]:
    """The loss of each round, and the MB up and down."""
    changed(place / "app", mods, bits, place / "out")
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
        "FLWR_HOME": str(place / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local",
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
    }  # fmt: skip
    federation = f"num-supernodes={clients} client-resources-num-cpus=1"
    command = ["flwr", "run", str(place / "app"), "--stream", "--federation-config", federation]
    command += ["--run-config", f"num-server-rounds={rounds} {config}"]
    try:
        done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=7200)
    finally:
        end_started(environment["FLWR_HOME"])
    losses = re.findall(r"MetricRecord: {'eval_loss': ([0-9.]+)", done.stdout + done.stderr)
    if len(losses) != rounds:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    rows = [json.loads(line) for line in (place / "out" / "bytes.jsonl").read_text().splitlines()]
    up, down = (sum(row["bytes"] for row in rows if row["way"] == way) / 1e6 for way in ("up", "down"))
    return [float(loss) for loss in losses], up, down


def main() -> None:
    """Print the table, a row a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--config", default="", help="More of the app's run config.")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    given = parser.parse_args()
    heads = "| | MB up | MB down | MB both | loss after one round | final loss |"
    print(f"{heads}\n{'| --- ' * 6}|", flush=True)
    for name in given.variants:
        with tempfile.TemporaryDirectory() as place:
            losses, up, down = run(Path(place), *VARIANTS[name], given.clients, given.rounds, given.config)
        print(f"| {name} | {up:.3g} | {down:.3g} | {up + down:.3g} | {losses[0]:.3f} | {losses[-1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
