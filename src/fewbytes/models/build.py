"""Builds a model from its name on the command line or in a TOML file."""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewbytes.base.errors import UserError, import_failed, one_line, suggestion
from fewbytes.base.extras import needs
from fewbytes.base.named import imported
from fewbytes.models.features import PooledFeatures
from fewbytes.models.hugging_face import PREFIX, hugging_face_model
from fewbytes.models.kgf import Kernels, with_generated_kernels
from fewbytes.models.normalisation import Normalisation
from fewbytes.models.normalise import with_normalisation
from fewbytes.models.resnet import DEPTHS, ResNet
from fewbytes.models.small import Cnn4, LeNet, Mlp
from fewbytes.models.unet import UNet
from fewbytes.models.vgg import Vgg9
from fewbytes.models.yolox import NAMES as DETECTORS
from fewbytes.models.yolox import STRIDE, Detector

NAMES = (
    "mlp",
    "cnn4",
    "lenet",
    "vgg9",
    "unet",
    *(f"resnet{depth}" for depth in DEPTHS),
    "resnet18-sigmoid",
    *DETECTORS,
)
"""The models of this package."""

_GOOGLENET, _MOBILENET = "torchvision:googlenet", "torchvision:mobilenet_v2"
_RESNETS = tuple(f"resnet{depth}:stem=7x7" for depth in (18, 34, 50, 101, 152))
_EIGHT = ("cnn4", _GOOGLENET, _MOBILENET, *_RESNETS)
MIXES: dict[str, tuple[str, ...]] = {
    "HtFE2": ("cnn4", _RESNETS[0]),
    "HtFE3": ("resnet10:stem=7x7", *_RESNETS[:2]),
    "HtFE4": ("cnn4", _GOOGLENET, _MOBILENET, _RESNETS[0]),
    "HtFE8": _EIGHT,
    "HtFE9": (*(f"resnet{depth}:stem=7x7" for depth in (4, 6, 8, 10)), *_RESNETS),
    "HtM10": (*_EIGHT, "torchvision:vit_b_16", "torchvision:vit_b_32"),
}
"""FedKTL's families of models by name, each with features pooled to one length (`HtFE8@256`; default 512)."""


def build_model(name: str, shape: tuple[int, ...], classes: int, learns: str = "classes") -> nn.Module:
    """Build a model for samples of `shape`, for example (3, 32, 32), with `classes` logits.

    `name` is one of

    - `resnet<depth>`: 4, 6, 8 and 10 (one basic block per stage), 18, 26, 34, 50, 101, 152; options `width` (64;
      channels of the first stage) and `stem` (`7x7` or `3x3`), as in `resnet18:width=32,stem=7x7`. The default stem is
      3x3, but 7x7 for depths up to 10 if images are so large that the last stage sees more than one pixel
    - `resnet18-sigmoid` with the same options, and `lenet`: smooth models, for `fewbytes attack`
    - `cnn4`, `vgg9` with the option `scale` (1.0), `mlp` with the options `hidden` (200) and `layers` (1)
    - `unet` with the option `width` (16; channels at the top): logits for every pixel
    - `yolox-nano`, `yolox-tiny`, `yolox-s`, `yolox-m`, `yolox-l` and `yolox-x`: detectors, for data with boxes
    - `torchvision:<name>`, any classifier of torchvision, with random weights
    - `hf:<folder or name>`, a model of transformers with its own weights and the head for what it `learns`
    - `package.module:callable`, your own. It is called with those of `shape`, `classes`, `num_classes` and
      `in_channels` that its signature has, and returns an `nn.Module`

    The name may end in `@K`, as in `resnet18:width=32@512`: features are then pooled to K numbers, and a new Linear
    classifies them (`PooledFeatures`). Vision transformers of torchvision get two Linears, with 768 units and tanh.

    Weights come from torch's global generator. Raises UserError for an invalid name, option or model.

    >>> from fewbytes.models import build_model
    >>> model = build_model("mlp:hidden=8", (1, 8, 8), classes=10)
    >>> model.fc1, model.fc
    (Linear(in_features=64, out_features=8, bias=True), Linear(in_features=8, out_features=10, bias=True))
    """
    if len(_expanded(name)) > 1:
        raise UserError(
            f"{name!r} is a mix of models, not one: use ModelBuilder, or one of {', '.join(_expanded(name))}"
        )
    if name.startswith(PREFIX):
        return hugging_face_model(name.removeprefix(PREFIX), shape, classes, learns)
    unpooled, size = _pooled(name)
    if not size:
        return _unpooled(name, shape, classes)
    hidden = 768 if unpooled.startswith("torchvision:vit_") else None
    return PooledFeatures(_unpooled(unpooled, shape, classes), size, classes, hidden)


def check_models_named(names: str) -> None:
    """Raises UserError for names, joined by `+`, that are wrong for all data. Weights and user's code are not read."""
    for name in (each for mix in names.split("+") for each in _expanded(mix)):
        if name.startswith(PREFIX):
            continue
        base, _, rest = _pooled(name)[0].partition(":")
        if base == "torchvision":
            _check_in_zoo(rest)
        elif base in NAMES:
            _options(base, rest)
        elif not rest or "=" in rest:
            raise _unknown(base)


def _pooled(name: str) -> tuple[str, int]:
    """A name without its number of pooled features, and that number; 0 for none. Raises UserError."""
    unpooled, at, size = name.partition("@")
    if at and not (size.isdecimal() and int(size) > 0):
        raise UserError(f"model {name!r} needs a positive whole number of features after @, not {size!r}")
    return unpooled, int(size) if at else 0


def _unknown(base: str) -> UserError:
    return UserError(
        f"unknown model {base!r}{suggestion(base, (*NAMES, *MIXES))}; there are {', '.join(NAMES)}, "
        f"torchvision:<name>, hf:<folder or name>, package.module:callable and the mixes {', '.join(MIXES)}"
    )


def _unpooled(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    base, _, rest = name.partition(":")
    if base == "torchvision":
        return _torchvision(rest, shape, classes)
    if base in NAMES:
        options = _options(base, rest)
        if base == "mlp":
            return Mlp(shape, classes, **options)
        if len(shape) != 3:
            raise UserError(f"{base} needs images (channels, height, width), but samples have shape {shape}; use mlp")
        if base in DETECTORS:
            if shape[0] != 3 or any(side % STRIDE for side in shape[1:]):
                raise UserError(f"{base} needs colour images whose sides are multiples of {STRIDE}, not {shape}")
            return Detector(base, classes)
        if base == "cnn4":
            return Cnn4(shape, classes)
        if base == "lenet":
            return LeNet(shape, classes)
        if base == "unet":
            return UNet(shape, classes, **options)
        if base == "vgg9":
            return Vgg9(shape, classes, **options)
        number, _, smooth = base.removeprefix("resnet").partition("-")
        options["stem"] = _stem(name, shape)
        return ResNet(int(number), shape[0], classes, activation=nn.Sigmoid if smooth else nn.ReLU, **options)
    if rest and "=" not in rest:
        return _own(base, rest, shape, classes)
    raise _unknown(base)


class ModelBuilder:
    """Builds client i's model from names joined by `+`, which repeat in order if there are more clients.

    One name is the model of all clients. ResNets without a `stem` share one: 3x3 if any ResNet in the list has it, else
    7x7. A name of `MIXES`, in any case, means its models with their stems: `HtFE2@64` is
    `cnn4@64+resnet18:stem=7x7@64`. `kernels`: how Fed-KGF generates the kernels of every model. `normalisation` is
    added to every model. Names, shapes, `learns` and errors are those of `build_model`.
    """

    def __init__(
        self,
        names: str,
        shape: tuple[int, ...],
        classes: int,
        kernels: Kernels | None = None,
        normalisation: Normalisation | None = None,
        learns: str = "classes",
    ) -> None:
        self.names = [model for name in _with_one_stem(names.split("+"), shape) for model in _expanded(name)]
        self.shape, self.classes, self.kernels, self.learns = shape, classes, kernels, learns
        self.normalisation = normalisation
        if len(self.names) > 1 and not all(self.names):
            raise UserError(f"a mix of models is a list of names joined by +, but {names!r} has an empty name")

    def __call__(self, client: int) -> nn.Module:
        """Build the model of `client`, with weights from torch's global generator."""
        model = build_model(self.names[client % len(self.names)], self.shape, self.classes, self.learns)
        model = model if self.kernels is None else with_generated_kernels(model, self.kernels)
        how = self.normalisation
        return model if how is None else with_normalisation(model, how, len(self.shape))

    def architecture(self, client: int) -> int:
        """An index that is equal for clients with the same model name."""
        return self.names.index(self.names[client % len(self.names)])


@cache
def batch_norm_names(model: nn.Module) -> set[str]:
    """Names of the parameters that belong to BatchNorm modules (weight and bias, not the running statistics)."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_parameters()
    }


def _expanded(name: str) -> list[str]:
    """The models of a mix; for any other name, a list of that name."""
    mix, at, size = name.partition("@")
    models = {known.lower(): models for known, models in MIXES.items()}.get(mix.lower())
    return [name] if models is None else [f"{model}@{size if at else 512}" for model in models]


def _stem(name: str, shape: tuple[int, ...]) -> str | None:
    """The stem of the ResNet `name`; None for other models. The default for shallow ResNets is 7x7, unless the last
    stage and its batch normalisation would see a single pixel."""
    base, _, options = name.partition("@")[0].partition(":")
    if base not in NAMES or not base.startswith("resnet"):
        return None
    named = re.search(r"(?:^|,)stem=([^,]*)", options)
    if named:
        return named[1]
    depth = int(re.findall(r"\d+", base)[0])
    halved = 2 ** (1 + len(DEPTHS[depth][1]))  # how much smaller the last stage's maps are; the stem halves twice
    return "7x7" if depth <= 10 and min(shape[1:], default=0) > halved else "3x3"


def _with_one_stem(names: list[str], shape: tuple[int, ...]) -> list[str]:
    """The names with stem 3x3 added to ResNets without a stem, if any ResNet in the list has that one."""
    if "3x3" not in [_stem(name, shape) for name in names]:
        return names
    result = []
    for name in names:
        model, at, size = name.partition("@")
        shallow = _stem(name, shape) == "7x7" and "stem=" not in model
        result.append(f"{model}{',' if ':' in model else ':'}stem=3x3{at}{size}" if shallow else name)
    return result


MOST = {"hidden": 1 << 16, "layers": 1 << 8, "width": 1 << 10}
"""Maximum values of the options: larger ones, possibly from a server or a file, could use up all memory."""


def _options(base: str, text: str) -> dict[str, Any]:
    """Parse `width=32,stem=7x7`; each option is checked against those of the model `base`."""
    takes = {
        "mlp": ("hidden", "layers"),
        "cnn4": (),
        "lenet": (),
        "vgg9": ("scale",),
        "unet": ("width",),
        **dict.fromkeys(DETECTORS, ()),
    }.get(base, ("width", "stem"))
    options: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        key, _, value = part.partition("=")
        if key not in takes:
            raise UserError(f"model {base} has no option {key!r}; it takes {', '.join(takes) or 'none'}")
        if key == "stem":
            if value not in ("7x7", "3x3"):
                raise UserError(f"model {base} has no stem {value!r}; it is 7x7 or 3x3")
            options[key] = value
        elif key == "scale":
            if not re.fullmatch(r"[0-9]*\.?[0-9]+", value) or float(value) == 0:
                raise UserError(f"model {base} needs a number above 0 for scale, not {value!r}")
            options[key] = float(value)
        else:
            if not (value.isdecimal() and 0 < int(value) <= MOST[key]):
                raise UserError(f"model {base} needs a whole number of 1 to {MOST[key]} for {key}, not {value[:40]!r}")
            options[key] = int(value)
    return options


def _check_in_zoo(name: str) -> ModuleType:
    """torchvision's models. Raises UserError if they are not installed, or there is no such classifier."""
    needs(f"the model torchvision:{name}", "vision", "torchvision")
    import torchvision.models as zoo

    names = zoo.list_models(module=zoo)
    if name not in names:
        raise UserError(
            f"torchvision has no classifier {name!r}{suggestion(name, names)}; see torchvision's list of models"
        )
    return zoo  # type: ignore[no-any-return]


def _torchvision(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    zoo = _check_in_zoo(name)
    if len(shape) != 3:
        raise UserError(f"torchvision:{name} needs images, but samples have shape {shape}; use mlp")
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": shape[1]}  # its position embedding has a fixed size
    model: nn.Module = _call(f"torchvision:{name}", zoo.get_model, name, weights=None, num_classes=classes, **options)
    if shape[0] != 3:
        _replace_first_convolution(model, shape[0])
    return model


def _replace_first_convolution(model: nn.Module, channels: int) -> None:
    place, old = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    sizes = {name: getattr(old, name) for name in ("kernel_size", "stride", "padding")}
    new = nn.Conv2d(channels, old.out_channels, **sizes, bias=old.bias is not None)
    model.set_submodule(place, new)


def _own(module: str, attribute: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    name = f"{module}:{attribute}"
    try:
        maker = imported(name)
    except UserError:
        raise
    except Exception as error:  # importing runs the user's code
        raise UserError(f"cannot import model {name!r}: {import_failed(error, module)}") from error
    if not callable(maker):
        raise UserError(f"model {name!r} is a {type(maker).__name__}, not a class or function that returns a model")
    offered = {"shape": shape, "classes": classes, "num_classes": classes, "in_channels": shape[0]}
    try:
        takes = set(inspect.signature(maker).parameters)
    except (TypeError, ValueError):  # some built-in callables have none
        takes = set()
    model = _call(name, maker, **{key: value for key, value in offered.items() if key in takes})
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _call(name: str, maker: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return maker(*args, **kwargs)
    except Exception as error:
        raise UserError(f"model {name!r} cannot be made with {kwargs}: {one_line(error)}") from error
