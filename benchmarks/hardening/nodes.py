"""What a hostile server gets of a node, and a neighbour of a host; each beside a control that must succeed."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figure
from torch import nn

import fewbytes as fb
from fewbytes.base.streams import seed_all
from fewbytes.core.privacy import clipped_sum
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments import app
from fewbytes.experiments.groups import GROUPS
from fewbytes.flower.allowance import Allowed, Allows
from fewbytes.flower.application import MANIFEST, app_config, application_files, is_installed, manifest_of
from fewbytes.flower.node import Node
from fewbytes.methods.parts import masks
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.exchange import Arrived, ByClient, Confirmed, Neighbours, Received, masks_of, numbers
from fewbytes.methods.parts.masks import quantised, secret_of
from fewbytes.methods.parts.summable import tensors_of, words_of
from fewbytes.models import build_model


def never(what: str, count: int, of: str = "") -> Figure:
    """A figure that is to be 0."""
    return Figure(what, f"{count}{of}", "0", count == 0)


def control(what: str, found: str, wanted: str) -> Figure:
    """What must succeed, or the figure beside it says nothing."""
    return Figure(f"control: {what}", found, wanted, found == wanted)


RUNS = ("apps", "fewbytes", "torch", "sitecustomize", "numpy", "usercustomize", "flwr")
LOADED = ("/__init__.pyc", ".pyc", ".so", ".abi3.so", "/__main__.pyc", ".pth", ".py", "/__init__.py", ".pyd", ".zip")


# ------------------------------------------------------------------------------------------------------- 26: its bundle


def bundled(files: Mapping[str, str | bytes]) -> bytes:
    """A bundle of files with the manifest that follows from them, if none is among them."""
    data = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    files = {MANIFEST: "\n".join(manifest_of(data)), **data}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as there:
        for name, text in files.items():
            there.writestr(name, text)
    return packed.getvalue()


def bundles(_: int) -> list[Figure]:
    """Row 26: bundles with a file more, of each name that Python loads something by, or one not as installed."""
    installed = application_files({"rounds": 3})
    listed = "\n".join(manifest_of({name: text.encode() for name, text in installed.items()}))
    others = [{**installed, f"{name}{end}": b"\0"} for name in RUNS for end in LOADED]
    others += [{**installed, name: text + " "} for name, text in installed.items() if name in ("apps.py", "LICENSE")]
    others += [{k: v for k, v in installed.items() if k != name} for name in installed]
    for change in (
        ("hatchling.build", "evil.build"),
        ('"fewbytes"', '"evil @ file:///evil"'),
        ("apps:client", "os:abort"),
    ):
        others.append({**installed, "pyproject.toml": installed["pyproject.toml"].replace(*change)})
    others.append({**installed, "pyproject.toml": app_config("fewbytes.cli.app:main", "apps:client", {})})
    for place in ("/etc/hostname", "/dev/zero", "../key.pem"):  # which Flower would open
        others.append({**installed, MANIFEST: f"{listed}\n{place},{'0' * 64},1"})
    taken = sum(is_installed(bundled(files)) for files in others if files != installed)
    bombs = [
        bundled({**installed, MANIFEST: bytes(1 << 27)}),
        bundled({**installed, **{f"{i}.py": bytes(1 << 20) for i in range(128)}}),
    ]
    tracemalloc.start()
    unfolds = any(map(is_installed, bombs))
    peak = tracemalloc.get_traced_memory()[1]
    return [
        never(f"bundles of a server other than the installed application, of {len(others)} kinds: run", taken),
        control("the installed application runs", str(is_installed(bundled(installed))), "True"),
        Figure(
            "bundles that decompress to 128 MiB, as one file and as 128",
            f"{'run' if unfolds else 'refused'}, with {peak / 2**20:.1f} MiB more memory",
            "refused, with at most 4 MiB",
            not unfolds and peak < 4 << 20,
        ),
    ]


# ----------------------------------------------------------------------------------------------------- 26: its settings


def settings(_: int) -> list[Figure]:
    """Row 26: files that a node opens because a server's setting names them, for each setting that is text."""
    seen: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        os.mkfifo(secret)

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]) == str(secret):
                seen.append(str(secret))
                raise PermissionError(str(secret))

        sys.addaudithook(note)
        names = [
            k for group in GROUPS.values() for k, each in group.declared().items() if each.kind in (str, str | None)
        ]
        config = {"method": "fedavg", "clients": 2, "rounds": 1, "parameters.epochs": 1}
        for key in (*names, "method", "public", "partition_options.path"):
            with contextlib.suppress(fb.UserError):
                app._serve_client(config | {key: str(secret)}, {"partition-id": 0})
        opened = len(seen)
        with contextlib.suppress(OSError):
            open(secret)  # noqa: SIM115
        return [
            never(f"files that a server's settings name and a node opens, of {len(names) + 3} settings", opened),
            control("opened files that are noticed", str(len(seen) - opened), "1"),
        ]


# -------------------------------------------------------------------------------------------- 27: the sum of one client


class Exchange:
    """An exchange of ten unmodified clients and a server that does as it likes."""

    def __init__(self) -> None:
        data = load_dataset("digits")
        dealt = federate(data, Partition("iid", clients=10), seed=0)
        self.task = fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)), seed=0)
        self.method = fb.SecureAggregation(fb.FedAvg(epochs=1, lr=0.1, batch=20))
        self.start = self.task.problem.first_state()
        self.states = {i: self.method.client(self.site(i)) for i in range(10)}
        self.keys = {i: self.method.advertise_keys(self.states[i], None, self.site(i)) for i in range(10)}
        self.public = {i: key.sealing + key.masking for i, key in self.keys.items()}
        self.weight = sum(key.samples for key in self.keys.values())
        self.refused: list[str] = []

    def site(self, client: int, what: str = "") -> fb.Site:
        site = fb.Site(self.task, client, 1, what)
        seed_all(site.seed)
        return site

    def asked(self, what: str, client: int, message: Any) -> Any:
        """A client's answer; None if it refuses."""
        try:
            site = self.site(client, "train" if what == "train" else "")
            return self.method.handle(what, self.states[client], message, site)
        except fb.FewbytesError as error:
            self.refused.append(str(error))
            return None

    def deal(self, told: Mapping[int, list[int]]) -> dict[int, dict[int, bytes]]:
        """Shares, where each client is told that these take part."""
        dealt = {}
        for i, cohort in told.items():
            message = Neighbours(numbers(cohort), ByClient.of({j: self.public[j] for j in cohort if j != i}))
            reply = self.asked("deal_shares", i, message)
            dealt[i] = {} if reply is None else reply.shares.each(masks.SEALED)
        return dealt

    def numbers_of(
        self, client: int, going: list[int], dealt: Mapping[int, Mapping[int, bytes]], start: Any = None
    ) -> Any:
        """What a client sends under its masks, flat."""
        shares = {j: dealt[j][client] for j in going if j != client and client in dealt[j]}
        self.asked("keep_shares", client, Received(numbers(going), ByClient.of(shares), self.weight))
        reply = self.asked("train", client, Model(fb.Dense(dict(start or self.start))))
        return None if reply is None else words_of(tensors_of(reply))

    def truth(self, client: int) -> Any:
        """The same in clear."""
        reply = self.method.inner.train(None, Model(fb.Dense(self.start)), self.site(client, "train"))
        part = self.keys[client].samples / self.weight
        return np.concatenate([quantised(v, 64.0, part) for _, v in sorted(reply.theta.dense().items())])


def like(found: Any, truth: Any) -> int:
    """How many numbers are the client's own, but for rounding."""
    if found is None:
        return 0
    apart = (found - truth).view(np.int32).astype(np.int64)
    return int((np.abs(apart) <= 16).sum())


def singled_out(_: int) -> list[Figure]:
    """Row 27: what a server recovers of one of ten unmodified clients, that it tells other things than the others."""
    everybody = list(range(10))
    one = Exchange()  # client 0 is told that it and 1 and 2 are all; the others that these two are gone
    dealt = one.deal({i: [0, 1, 2] if i == 0 else everybody for i in everybody})
    sent = one.numbers_of(0, [0, 1, 2], dealt)
    for i in everybody[1:]:
        one.numbers_of(i, everybody, dealt)
    marks: dict[int, dict[int, bytes]] = {}
    for i in everybody:
        reply = one.asked(
            "confirm", i, Arrived(numbers([0, 1, 2] if i == 0 else [j for j in everybody if j not in (1, 2)]))
        )
        marks[i] = {} if reply is None else reply.marks.each(16)
    opened = 0
    for i in everybody:
        mine = {j: found[i] for j, found in marks.items() if i in found}
        opened += one.asked("reveal_shares", i, Confirmed(ByClient.of(mine))) is not None and i in (1, 2)
    got = like(sent, one.truth(0)) if sent is not None and opened >= 2 else 0
    two = Exchange()  # the others get a model of zeros, from which nothing is learnt
    dealt = two.deal(dict.fromkeys(everybody, everybody))
    dead = {n: torch.zeros_like(v) for n, v in two.start.items()}
    words = [two.numbers_of(i, everybody, dealt, None if i == 0 else dead) for i in everybody]
    seeds = [two.states[i].secrets.seed for i in everybody]
    total = masks.masked(np.sum(words, axis=0, dtype=np.uint32), (), seeds)
    apart = like(total - words_of_dead(two, dead), two.truth(0))
    three = Exchange()  # control: six of the nine neighbours tell the server all they know
    dealt = three.deal(dict.fromkeys(everybody, everybody))
    sent = three.numbers_of(0, everybody, dealt)
    told = like(colluded(three, sent, dealt, [1, 2, 3, 4, 5, 6]), three.truth(0))
    size = sum(v.numel() for v in one.start.values())
    return [
        never("numbers recovered of one client that was told that two neighbours are gone", got, f" of {size:,}"),
        Figure(
            "the same from a sum with nine clients that were sent a dead model",
            f"{apart} of {size:,}",
            "by chance, 2",
            apart <= 2,
        ),
        control("the same with the help of six of nine neighbours", f"{told:,}", f"{size:,}"),
    ]


def words_of_dead(exchange: Exchange, dead: Any) -> Any:
    """What the others' contributions come to in clear."""
    total: Any = 0
    for i in range(1, 10):
        reply = exchange.method.inner.train(None, Model(fb.Dense(dict(dead))), exchange.site(i, "train"))
        part = exchange.keys[i].samples / exchange.weight
        total = total + np.concatenate([quantised(v, 64.0, part) for _, v in sorted(reply.theta.dense().items())])
    return total


def colluded(exchange: Exchange, words: Any, dealt: Any, malicious: list[int]) -> Any:
    """Client 0's numbers, as these of its neighbours can clear them of masks."""
    shares = {}
    for i in malicious:
        mine = exchange.states[i].secrets
        key = masks.agreed(masks.private_key(mine.sealing), exchange.keys[0].sealing, f"shares from 0 for {i}")
        shares[i] = masks.opened(key, dealt[0][i]) or b""
    seed, private = (secret_of({i: share[half] for i, share in shares.items()}) for half in (slice(33), slice(33, 66)))
    seen = masks_of(exchange.states[0].secrets.view)
    others = [masks.agreed(masks.private_key(private), exchange.keys[i].masking, seen) for i in range(1, 10)]
    return masks.masked(words, (), [seed, *others])  # client 0 added them all


# ----------------------------------------------------------------------------------------------- 28: privacy of samples


def oracle(count: int) -> list[Figure]:
    """Row 28: how often a model made for it tells that a sample is there, of so many that are and as many that are not,
    and how many orders a node answers beyond what its site allows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].weight[0, 0] = 3e38
        model[2].weight.fill_(3e38)
    found = plain = 0
    y = torch.zeros(8, dtype=torch.int64)
    for seed in range(count):
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(seed)) * torch.tensor([0.0, 1, 1, 1])
        there = x.clone()
        there[3, 0] = 1.0  # the sample that is looked for
        how = (model, dict(model.named_parameters()), nn.functional.cross_entropy)
        told = [
            any(not bool(v.isfinite().all()) for v in clipped_sum(*how, each, y, 1.0).values()) for each in (there, x)
        ]
        found += told == [True, False]
        model.zero_grad()
        nn.functional.cross_entropy(model(there), y).backward()
        plain += any(not bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    return [
        never(f"of {count} samples, detected with certainty by an answer that is not finite", found),
        control("the same without --dp", str(plain), str(count)),
        *budget(count),
    ]


def budget(_: int) -> list[Figure]:
    """A node that promised one round of epsilon 1 is asked under forty names, as one client and as the other."""
    random = torch.Generator().manual_seed(0)

    def some(n: int) -> Any:
        return torch.randn(n, 6, generator=random), torch.randint(0, 3, (n,), generator=random)

    task = fb.Task.of(lambda: nn.Linear(6, 3), [(some(40), some(5)) for _ in range(2)], some(9))
    method = fb.FedAvg(epochs=1, lr=0.1, batch=8)
    made = method.promising(method.adapted(task), "of=samples,epsilon=1,delta=1e-5,clip=1.0", 1)
    answered = {}
    for allows in (Allows(), Allows(privacy=Allowed(), run_folders=1000)):
        count = 0
        with tempfile.TemporaryDirectory() as folder:
            for name in range(40):
                node = Node(method, made, Path(folder), f"run-{name}", allows=allows)
                with contextlib.suppress(fb.FewbytesError):
                    node._allowance.trained(name % 2, bytes([name]) * 32, made.problem.privacy.spent(40, 1))
                    count += 1
        answered[allows.privacy] = count
    return [
        Figure(
            "orders that a node answers under 40 names of runs, if the first promised one round",
            str(answered[""]),
            "1",
            answered[""] == 1,
        ),
        control("if its site allows any", str(answered["any"]), "40"),
    ]


# ---------------------------------------------------------------------------------------------- 29: a neighbour's files

PLANTS = ("a pipe", "a link to a pipe", "a link to another's file", "a folder")
CODE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from fewbytes.base.files import ScratchFolder
ScratchFolder("exchange").close()
print("done")
"""


def planted(_: int) -> list[Figure]:
    """Row 29: runs that hang, or write elsewhere, by what a neighbour left in the folder for temporary files."""
    hung = written = removed = 0
    for what in PLANTS:
        with tempfile.TemporaryDirectory() as folder:
            theirs, place = Path(folder) / "theirs", Path(folder) / "fewbytes-exchange-old"
            theirs.write_text("theirs")
            place.mkdir()
            pipe = Path(folder) / "pipe"
            os.mkfifo(pipe)
            lock = place / "lock"
            if what == "a pipe":
                os.mkfifo(lock)
            elif what == "a folder":
                lock.mkdir()
            else:
                lock.symlink_to(pipe if "pipe" in what else Path(folder) / "created")
            try:
                done = subprocess.run([sys.executable, "-c", CODE, folder], timeout=60, capture_output=True, text=True)
                hung += "done" not in done.stdout
            except subprocess.TimeoutExpired:
                hung += 1
            written += (Path(folder) / "created").exists()
            removed += not theirs.exists()
    with tempfile.TemporaryDirectory() as folder:  # of ours, whose process is gone
        left = Path(folder) / "fewbytes-exchange-old"
        left.mkdir(mode=0o700)
        (left / "lock").touch()
        subprocess.run([sys.executable, "-c", CODE, folder], timeout=60, check=True, capture_output=True)
        cleared = not left.exists()
    return [
        never(f"runs that hang or end because of files that another account left, of {len(PLANTS)} kinds", hung),
        never("files created or removed elsewhere", written + removed),
        control("files of the user's own killed run are removed", str(cleared), "True"),
    ]
