"""One model over slow links: bytes, accuracy and time of Flower's FedAvg, NVFlare's with 4 bits, and ours.

    FEWBYTES_DATA=… python benchmarks/links/compare.py --mbit 100 10 --rounds 12
    FEWBYTES_DATA=… python benchmarks/links/compare.py --mbit 1 --rounds 2

Real deployments on one machine: a server, and a process for each site, whose only way to the server is a proxy that
limits its link in both directions and counts what passes, TLS included. ResNet-18 (11,181,642 values) on CIFAR-10
pictures; all systems start from the same weights and take the same local steps. What starts before the first model
leaves the server is not timed; models are scored when the run has ended. `s to target`: when the global model first was
as accurate as Flower's FedAvg at its last round, less half a point; a bar where it was not.

Needs, in one environment: `fewbytes[flower]`, torchvision, pyarrow, pillow, and for NVFlare's rows nvflare and
bitsandbytes (NVFlare's quantisers ask for a GPU; benchmarks/nvflare/on_cpu.py has them run without).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measuring import Measured, Terms, measured
from systems import deployed, flower, nvflare

SYSTEMS: dict[str, Callable[[Terms], Measured]] = {
    "Flower's FedAvg": partial(measured, flower, {"LINKS_UP": "", "LINKS_DOWN": ""}),
    "NVFlare's FedAvg": partial(measured, nvflare, {"LINKS_QUANTISER": ""}),
    "NVFlare's FedAvg, 4 bits": partial(measured, nvflare, {"LINKS_QUANTISER": "normfloat4"}),
    "NVFlare's FedAvg, 8 bits": partial(measured, nvflare, {"LINKS_QUANTISER": "blockwise8"}),
    "Flower's FedAvg, two lines changed": partial(measured, flower, {"LINKS_UP": "0.5", "LINKS_DOWN": "1"}),
    "fewbytes deploy fedavg": deployed,
}
"""The last two: half a bit a value up, one down."""
HEADS = "", "accuracy", "MB up", "MB down", "MB both", "times fewer bytes than the first", "s a round", "s to target"


def main() -> None:
    """Print a table a rate, a row a system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0], help="rates of each site's link, both ways")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000, help="images of each site")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON lines")
    given = parser.parse_args()
    for mbit in given.mbit:
        print(f"\n{given.sites} sites of {given.images} images, {mbit:g} Mbit/s each way, {given.rounds} rounds\n")
        print(f"| {' | '.join(HEADS)} |")
        print("| --- " * 8 + "|", flush=True)
        of_first: Measured | None = None
        for name in given.systems:
            run = SYSTEMS[name](Terms(given.sites, given.images, given.rounds, mbit))
            of_first = of_first or run
            up, down, target = run.up[-1], run.down[-1], of_first.accuracy[-1] - 0.005
            there = run.first(target)
            fewer = (of_first.up[-1] + of_first.down[-1]) / (up + down)
            soon = "|" if there is None else f"{run.seconds[there]:.0f} (round {there + 1})"
            each = run.seconds[-1] / given.rounds
            print(
                f"| {name} | {100 * run.accuracy[-1]:.1f} % | {up:.4g} | {down:.4g} | {up + down:.4g} | {fewer:.3g} | "
                f"{each:.1f} | {soon} |",
                flush=True,
            )
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps({"system": name, "mbit": mbit} | run._asdict()) + "\n")


if __name__ == "__main__":
    main()
