"""Run NVFlare's hello example with two clients: `hello_job.py sim|poc FOLDER none|UP DOWN [first]`."""

from __future__ import annotations

import sys
from pathlib import Path

from hello_network import Network
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, SimEnv

from fewbytes.nvflare.filters import add_filters

where, folder, *bits = sys.argv[1:]
first = Network() if bits[-1] == "first" else None
recipe = FedAvgRecipe(
    name="hello", min_clients=2, num_rounds=4, model=Network(),
    train_script=str(Path(__file__).with_name("hello_client.py")),
)  # fmt: skip
if bits != ["none"]:
    up, down = (None if each == "lossless" else float(each) for each in bits[:2])
    add_filters(recipe, up, down, first=first)
if where == "sim":
    recipe.execute(SimEnv(num_clients=2, workspace_root=folder))
else:
    run = recipe.execute(PocEnv(num_clients=2))
    print("result:", run.get_result(timeout=300), run.get_status())
