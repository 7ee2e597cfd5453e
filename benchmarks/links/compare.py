"""One model over slow links: bytes, accuracy and time of Flower's FedAvg, NVFlare's with 4 bits, and ours.

    FEWBYTES_DATA=… python benchmarks/links/compare.py --mbit 10 --rounds 8 --out links.jsonl
    FEWBYTES_DATA=… python benchmarks/links/compare.py --mbit 1 --rounds 2 --out links.jsonl
    python benchmarks/links/page.py links.jsonl     # writes the tables of docs/links.md and README, and the pictures

Real deployments on one machine: a server, and a process for each site, whose only way to the server is a proxy that
limits its link in both directions and counts what passes, TLS included. ResNet-18 (11,181,642 values) on CIFAR-10
pictures; all systems start from the same weights and take the same local steps. What starts before the first model
leaves the server is not timed; models are scored when the run has ended.

Needs, in one environment: `fewbytes[flower]`, torchvision, pyarrow, pillow, and for NVFlare's rows nvflare and
bitsandbytes (NVFlare's quantisers ask for a GPU; benchmarks/nvflare/on_cpu.py has them run without).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measuring import Measured, Terms, measured, measured_alone
from page import FLOWER, OURS, WITHOUT
from systems import alone, deployed, flower, nvflare

SYSTEMS: dict[str, Callable[[Terms], Measured]] = {
    FLOWER: partial(measured, flower, {"LINKS_UP": "", "LINKS_DOWN": ""}),
    "NVFlare's FedAvg": partial(measured, nvflare, {"LINKS_QUANTISER": ""}),
    "NVFlare's FedAvg, 8 bits": partial(measured, nvflare, {"LINKS_QUANTISER": "blockwise8"}),
    "NVFlare's FedAvg, 4 bits": partial(measured, nvflare, {"LINKS_QUANTISER": "normfloat4"}),
    OURS: partial(measured, flower, {"LINKS_UP": "1", "LINKS_DOWN": "1", "LINKS_FIRST": "1"}),
    WITHOUT: partial(measured, flower, {"LINKS_UP": "1", "LINKS_DOWN": "1", "LINKS_FIRST": ""}),
    "fewbytes deploy fedavg": deployed,
    "training alone": partial(measured_alone, alone),
}
"""The first is what others are compared with. Ours: one bit a value in both directions."""


def main() -> None:
    """Print a line a system, and keep all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0], help="rates of each site's link, both ways")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000, help="images of each site")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--out", type=Path, required=True, help="a file to which all figures are added, as JSON lines")
    given = parser.parse_args()
    for mbit in given.mbit:
        print(f"{given.sites} sites of {given.images} images, {mbit:g} Mbit/s each way, {given.rounds} rounds")
        for name in given.systems:
            found = SYSTEMS[name](Terms(given.sites, given.images, given.rounds, mbit))._asdict()
            run = {"system": name, "mbit": mbit, "rounds": given.rounds} | found
            with given.out.open("a") as file:
                file.write(json.dumps(run) + "\n")
            seconds, moved = found["seconds"][-1] / given.rounds, (found["up"][-1] + found["down"][-1]) / given.rounds
            print(f"{name}: {found['accuracy'][-1]:.1%}, {seconds:.1f} s and {moved:.4g} MB a round", flush=True)


if __name__ == "__main__":
    main()
