"""NVFlare's hello-pt as it is, with its own quantisers, and with this package's filters: accuracy, and bytes each way.

    python benchmarks/nvflare/compare.py --clients 4 --rounds 12

The job runs in NVFlare's simulator, by its recipe and Client API, on CIFAR-10 images from FEWBYTES_DATA. Bytes are
those that the filters leave in messages for arrays, counted by a filter after them; what 8-bit and 4-bit quantisers
need to undo their work (`quant_state`) is among them. NVFlare runs these two on a GPU only: here on_cpu.py has them run
on the CPU, by the same library (bitsandbytes).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import torch
from network import Network
from PIL import Image

HERE = Path(__file__).parent
VARIANTS: dict[str, tuple[str, float | None, float | None]] = {
    "the example as it is": ("", None, None),
    "NVFlare float16": ("float16", None, None),
    "NVFlare blockwise8": ("blockwise8", None, None),
    "NVFlare float4": ("float4", None, None),
    "NVFlare normfloat4": ("normfloat4", None, None),
    "fewbytes, lossless": ("fewbytes", None, None),
    "fewbytes, up 0.5 bits": ("fewbytes", 0.5, None),
    "fewbytes, up 0.5, down 1 bit": ("fewbytes", 0.5, 1),
    "fewbytes, up 0.5, down 1 bit, `first`": ("fewbytes first", 0.5, 1),
    "fewbytes, up 0.5, down 0.5 bits": ("fewbytes", 0.5, 0.5),
}
"""By name the filters, and for fewbytes the bits up and down; `first`: clients hold the first weights."""


def images(part: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images of CIFAR-10, (n, 3, 32, 32) from -1 to 1, and their labels."""
    (file,) = (Path(os.environ["FEWBYTES_DATA"]) / "cifar10").glob(f"{part}-*.parquet")
    rows = parquet.read_table(file).slice(0, number).to_pydict()
    pictures = rows["img" if "img" in rows else "image"]
    found = np.stack([np.asarray(Image.open(BytesIO(picture["bytes"])).convert("RGB")) for picture in pictures])
    return (found.transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype(np.float32), np.array(rows["label"], np.int64)


def job(place: Path, variant: str, given: argparse.Namespace, seed: int) -> None:
    """Run a variant in the simulator, in this process."""
    from counting import ByteCounter
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    recipe = FedAvgRecipe(
        name="hello", min_clients=given.clients, num_rounds=given.rounds, model=Network(seed),
        train_script=str(HERE / "client.py"), train_args=f"--data {place / 'data.npz'} --lr {given.lr}",
    )  # fmt: skip
    name, up, down = VARIANTS[variant]
    if name.startswith("fewbytes"):
        from fewbytes.nvflare.filters import add_filters

        first = Network(seed) if name.endswith("first") else None
        add_filters(recipe, up=up, down=down, first=first)
    elif name:
        from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
        from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

        recipe.add_server_output_filter(ModelQuantizer(name), tasks=["train"])
        recipe.add_client_input_filter(ModelDequantizer(), tasks=["train"])
        recipe.add_client_output_filter(ModelQuantizer(name), tasks=["train"])
        recipe.add_server_input_filter(ModelDequantizer(), tasks=["train"])
    file = str(place / "bytes.jsonl")
    recipe.add_server_output_filter(ByteCounter(file, "down"), tasks=["train"])
    recipe.add_client_output_filter(ByteCounter(file, "up"), tasks=["train"])
    recipe.execute(SimEnv(num_clients=given.clients, workspace_root=str(place / "workspace")))


def run(variant: str, given: argparse.Namespace, seed: int) -> tuple[float, float, float]:
    """Run a variant in a process of its own: the global model's accuracy on the test images, and MB up and down."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        x, y = images("train", given.images)
        keep = len(x) // given.clients * given.clients
        split = (given.clients, keep // given.clients)
        np.savez(place / "data.npz", images=x[:keep].reshape(*split, 3, 32, 32), labels=y[:keep].reshape(split))
        (place / "site").mkdir()
        (place / "site" / "sitecustomize.py").write_text("import on_cpu\n" if variant.startswith("NVFlare") else "")
        paths = [str(place / "site"), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, __file__, *sys.argv[1:], "--job", variant, "--place", folder, "--seed", str(seed)]
        done = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True, timeout=given.timeout)
        found = [*(place / "workspace").rglob("FL_global_model.pt")]
        if done.returncode or not found:
            raise RuntimeError((done.stdout + done.stderr)[-4000:])
        saved = torch.load(found[0], weights_only=True)
        net = Network()
        net.load_state_dict(saved["model"])
        x, y = images("test", 2000)
        with torch.no_grad():
            accuracy = float((net(torch.from_numpy(x)).argmax(1) == torch.from_numpy(y)).float().mean())
        rows = [json.loads(line) for line in (place / "bytes.jsonl").read_text().splitlines()]
        expected = given.clients * given.rounds
        for way in ("up", "down"):
            assert sum(row["way"] == way for row in rows) == expected, f"not all messages {way} were sent"
        up, down = (sum(row["bytes"] for row in rows if row["way"] == way) / 1e6 for way in ("up", "down"))
        return accuracy, up, down


def main() -> None:
    """Print the table, a row a variant, as means over the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="Seconds a run may take.")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        job(given.place, given.job, given, given.seed)
        return
    heads = "| | accuracy | MB up | MB down | MB both | times fewer bytes than the example, both |"
    print(f"{heads}\n{'| --- ' * 6}|", flush=True)
    first = 0.0
    for name in given.variants:
        values = [run(name, given, seed) for seed in range(given.runs)]
        accuracy, up, down = map(statistics.mean, zip(*values, strict=True))
        spread = f" ± {100 * statistics.stdev(value[0] for value in values):.1f}" if given.runs > 1 else ""
        first = first or up + down
        row = f"{100 * accuracy:.1f}{spread} % | {up:.3g} | {down:.3g} | {up + down:.3g} | {first / (up + down):.3g}"
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
