"""Submits the job to NVFlare's server and waits for its end: its FedAvg, its quantiser if LINKS_QUANTISER names one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.prod_env import ProdEnv
from nvflare_keep import Keeper
from task import keep, network

TASKS = ["train"]


def main(kit: str, rounds: int) -> None:
    """Run it; the model of the last round is kept as well."""
    here, sites = Path(__file__).parent, int(os.environ["LINKS_SITES"])
    recipe = FedAvgRecipe(
        name="links",
        min_clients=sites,
        num_rounds=rounds,
        model=network(),
        train_script=str(here / "nvflare_client.py"),
    )
    recipe.add_server_output_filter(Keeper(), tasks=TASKS)
    if name := os.environ["LINKS_QUANTISER"]:
        recipe.add_server_output_filter(ModelQuantizer(name), tasks=TASKS)
        recipe.add_client_input_filter(ModelDequantizer(), tasks=TASKS)
        recipe.add_client_output_filter(ModelQuantizer(name), tasks=TASKS)
        recipe.add_server_input_filter(ModelDequantizer(), tasks=TASKS)
    result = recipe.execute(ProdEnv(startup_kit_location=kit)).get_result()
    (file,) = Path(str(result)).rglob("FL_global_model.pt")
    keep(torch.load(file, weights_only=True)["model"], rounds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
