"""Recalibration: batch normalisation's statistics, estimated again from a client's own samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewbytes.base.errors import UserError
from fewbytes.base.state import in_training
from fewbytes.core.devices import Precision, arithmetic
from fewbytes.core.training import EVALUATION_BATCH, batches


def recalibrate(model: nn.Module, x: Any, precision: Precision = "float32") -> nn.Module:
    """The model in eval mode, with the running statistics of its batch normalisations replaced by means over batches of
    samples x (n, …). Nothing else changes. A single sample has no variance and changes nothing. Frozen statistics
    stay."""
    norms = _recalibrated(model)
    model.eval()
    if len(x) < 2:
        return model
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # mean over all batches
        norm.train()
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start, stop in batches(len(x), EVALUATION_BATCH):
            model(x[start:stop])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def check_recalibrates(model: nn.Module, method: str, own_models: bool) -> None:
    """Raises UserError if nothing can be recalibrated: clients have no model of their own, or it has no statistics."""
    if not own_models:
        raise UserError(f"the clients of {method} keep no model of their own: leave recalibrate out")
    if not _recalibrated(model):
        raise UserError(f"a {type(model).__name__} trains no statistics of batch normalisation: leave recalibrate out")


def _recalibrated(model: nn.Module) -> list[_BatchNorm]:
    """The batch normalisations with statistics that are not frozen."""
    norms = [module for module in in_training(model).modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if norm.training and norm.track_running_stats]
