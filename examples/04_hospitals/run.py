"""Three hospitals train together over TLS on this machine; README.md says what happens."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow.parquet as pq
import torch
from PIL import Image
from relay import slow_link
from sites import SITES, make_sites

import fewbytes as fb

SLOW, REBOOTED = "north", "south"
SECONDS = 600  # that anything may take


class Hospital:
    """A site's machine: a copy of the folder `fewbytes deploy` made for it, beside data that only it has."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self.folder, self.node = folder, folder / "node"
        shutil.copytree(prepared, self.node)

    def reach(self, port: int, other: int) -> None:
        """Reach the server by another port."""
        about = self.node / "node.toml"
        about.write_text(about.read_text().replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}"))

    def start(self) -> None:
        """What somebody types at the site: sh start.sh."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"FEWBYTES_DATA": str(self.folder), "PATH": path}
        with open(self.folder / "node.log", "ab") as log:
            self.process = subprocess.Popen(
                ["sh", "start.sh"], cwd=self.node, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, how: signal.Signals) -> None:
        """End the node and all it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
            self.process.wait()


def main() -> None:
    """Make the sites, run, and check the results."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dataset", default="digits", help="images that are split among the sites")
    options.add_argument("--part", type=float, default=1.0, help="how much of them")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--model", default="mlp")
    options.add_argument("--rate", type=float, default=20_000, help="bytes a second of the slow link")
    options.add_argument(
        "--restart", choices=["reboot", "kill", "none"], default="reboot", help="of a site, after round 2"
    )
    options.add_argument("--out", type=Path, default=Path("hospitals"))
    given, more = options.parse_known_args()  # what else is given is for fewbytes deploy
    out: Path = given.out.absolute()
    held = make_sites(out, given.dataset, given.part)
    print("images:", ", ".join(f"{name} {count}" for name, count in held.items()), flush=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    terms = ["epochs=2", "lr=0.05", "batch=20"]
    command = [
        sys.executable, "-m", "fewbytes", "deploy", "fedavg", "--dataset", "scans", "--partition", "local",
        "--hosts", ",".join(SITES), "--address", f"127.0.0.1:{port}", "--rounds", str(given.rounds),
        "--model", given.model, *(word for term in terms for word in ("--set", term)),
        "--round-timeout", "120", "--out", str(out / "runs"), *more,
    ]  # fmt: skip
    server = subprocess.Popen(command, env=os.environ | {"FEWBYTES_DATA": str(out / "server")})
    hospitals: dict[str, Hospital] = {}
    try:
        run = follow(server, port, given, out, hospitals)
    finally:
        for hospital in hospitals.values():
            hospital.end(signal.SIGTERM)
        server.terminate()
        server.wait()
    check(run, out, held, given.restart != "none")


def follow(
    server: subprocess.Popen[bytes], port: int, given: argparse.Namespace, out: Path, hospitals: dict[str, Hospital]
) -> Path:
    """Start the sites when the server waits for them, restart one in the middle; the run's folder, when it is done."""

    def until(holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            if server.poll() is not None:
                raise SystemExit(f"the server has ended with exit code {server.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing has come of it in {SECONDS} s")
            time.sleep(0.2)

    def prepared() -> bool:
        return len(list((out / "runs").glob("*/deployment/nodes/*/start.sh"))) == len(SITES)

    until(prepared)
    (run,) = (out / "runs").iterdir()
    for name in SITES:
        hospitals[name] = Hospital(out / name, run / "deployment" / "nodes" / name)
        if name == SLOW:
            hospitals[name].reach(port, slow_link(port, given.rate))
        hospitals[name].start()
    if given.restart != "none":
        until(lambda: len(rounds(run)) >= 2)
        site = hospitals[REBOOTED]
        site.end(signal.SIGKILL if given.restart == "kill" else signal.SIGTERM)
        print(f"{REBOOTED} is down after round {len(rounds(run))}", flush=True)
        time.sleep(2)
        site.start()
    server.wait(SECONDS)
    if server.returncode:
        raise SystemExit(f"the server has ended with exit code {server.returncode}")
    return run


def rounds(run: Path) -> list[dict[str, object]]:
    """The rounds that are done."""
    path = run / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(run: Path, out: Path, held: dict[str, int], restarted: bool) -> None:
    """Print, and insist on, what README.md says of the run."""
    result = json.loads((run / "result.json").read_text())
    partition = json.loads((run / "partition.json").read_text())
    for i, name in enumerate(SITES):  # of a site without test images a fifth of each class is held out
        train, test = partition["train"][i], partition["test"][i]
        files = len(list((out / name / "scans").rglob("*.png")))
        assert train + test == files == held[name], (name, train, test, files)
    print(f"every image is used: {sum(partition['train'])} to train, {sum(partition['test'])} to test")
    ledger = pq.read_table(run / "ledger.parquet").to_pylist()
    for i, name in enumerate(SITES):
        mine = [row for row in ledger if row["client"] == i and row["outcome"] == "answered"]
        took_part = sorted({row["round"] for row in mine})
        up, down = (sum(row[way] for row in mine) / 1e6 for way in ("bytes_up", "bytes_down"))
        print(f"{name}: {up:.2f} MB up, {down:.2f} MB down, in rounds {', '.join(map(str, took_part))}")
        if name == REBOOTED and restarted:
            assert took_part[0] == 1, took_part
            assert took_part[-1] == result["rounds"], took_part
        else:
            assert took_part == list(range(1, result["rounds"] + 1)), (name, took_part)
    x, y = test_images(out / "server" / "scans" / "test")
    fb.export_model(run, formats=["torch", "onnx"])
    exported = run / "export"
    with torch.no_grad():
        found = torch.export.load(exported / "model.pt2").module()(x).argmax(1)
    also = onnxruntime.InferenceSession(exported / "model.onnx").run(None, {"x": x.numpy()})[0].argmax(1)
    assert found.tolist() == also.tolist()
    accuracy = float((found == y).float().mean())
    assert abs(accuracy - result["score"]["final"]) < 1e-6, (accuracy, result["score"])
    print(f"the exported model, in plain PyTorch and onnxruntime: {accuracy:.1%} of the server's test images")


def test_images(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The server's images (n, channels, height, width) in 0..1, and their labels, read without this package."""
    images, labels = [], []
    for label, place in enumerate(sorted(folder.iterdir())):
        for path in sorted(place.iterdir()):
            pixels = np.asarray(Image.open(path), dtype=np.float32) / 255
            images.append(torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1))
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


if __name__ == "__main__":
    main()
