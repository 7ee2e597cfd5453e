"""The public names of `fewbytes.models`."""

from __future__ import annotations

from fewbytes.models.build import batch_norm_names, build_model
from fewbytes.models.builders import default_model
from fewbytes.models.ensemble import LogitMean
from fewbytes.models.features import PooledFeatures
from fewbytes.models.resnet import ResNet
from fewbytes.models.small import Cnn4, Mlp
from fewbytes.models.vgg import Vgg9

__all__ = [
    "Cnn4",
    "LogitMean",
    "Mlp",
    "PooledFeatures",
    "ResNet",
    "Vgg9",
    "batch_norm_names",
    "build_model",
    "default_model",
]
