"""A component of NVFlare's server that keeps the model after each round, as NVFlare has saved it."""

from __future__ import annotations

from pathlib import Path

import torch
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from task import first, keep


class Keeper(FLComponent):
    """Keeps the first weights when the first round starts, and the global model at the end of each round."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep a model."""
        done = int(fl_ctx.get_prop(AppConstants.CURRENT_ROUND, 0))
        if event_type == AppEventType.ROUND_STARTED and not done:
            keep(first(), 0)
        if event_type == AppEventType.AFTER_LEARNABLE_PERSIST:
            folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
            (file,) = folder.rglob("FL_global_model.pt")
            keep(torch.load(file, weights_only=True)["model"], done + 1)
