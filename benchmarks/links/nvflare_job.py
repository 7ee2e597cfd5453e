"""Submits the job to NVFlare's server and waits for its end: its FedAvg, its quantiser if LINKS_QUANTISER names one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.prod_env import ProdEnv
from nvflare_keep import Keeper
from task import Network

TASKS = ["train"]


def main(kit: str, rounds: int) -> None:
    """Run it."""
    here, sites = Path(__file__).parent, int(os.environ["LINKS_SITES"])
    recipe = FedAvgRecipe(
        name="links",
        min_clients=sites,
        num_rounds=rounds,
        model=Network(),
        train_script=str(here / "nvflare_client.py"),
    )
    recipe._job.to_server(Keeper())
    if name := os.environ["LINKS_QUANTISER"]:
        recipe.add_server_output_filter(ModelQuantizer(name), tasks=TASKS)
        recipe.add_client_input_filter(ModelDequantizer(), tasks=TASKS)
        recipe.add_client_output_filter(ModelQuantizer(name), tasks=TASKS)
        recipe.add_server_input_filter(ModelDequantizer(), tasks=TASKS)
    recipe.execute(ProdEnv(startup_kit_location=kit)).get_result()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
