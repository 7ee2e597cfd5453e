"""Compares fewbytes with PFLlib (https://github.com/TsingZ0/PFLlib): the same data, first weights, terms and rounds.

    git clone https://github.com/TsingZ0/PFLlib
    python benchmarks/peers/pfllib.py --pfllib PFLlib           # all methods, minutes; writes docs/agreement.json
    python benchmarks/peers/pfllib.py --pfllib PFLlib fedavg    # these methods alone
    python benchmarks/peers/page.py                             # then: the tables of docs/agreement.md and the cards

PFLlib needs scikit-learn, h5py and torchvision, beside what fewbytes needs. A method is one row of METHODS.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from common import LR, TERMS, Row
from compare import main
from tsingz0 import Watch

import fewbytes as fb
from fewbytes.methods.fedbn import without_batch_norm
from fewbytes.methods.fedrep import body

METHODS = {
    "separate": Row(fb.Separate(**TERMS), "Local"),
    "fedavg": Row(fb.FedAvg(**TERMS), "FedAvg", sent="global"),
    "fedprox": Row(fb.FedProx(**TERMS, mu=0.1), "FedProx", ("-mu", "0.1"), sent="global"),
    "scaffold": Row(fb.SCAFFOLD(**TERMS), "SCAFFOLD", sent="global"),
    "fedper": Row(fb.FedPer(**TERMS), "FedPer", sent=body),
    "fedrep": Row(fb.FedRep(**TERMS, head_epochs=2), "FedRep", ("-pls", "2"), sent=body, weighted=False, even=True),
    "fedbn": Row(fb.FedBN(**TERMS), "FedBN", sent=without_batch_norm, norm=True),
    "ditto": Row(fb.Ditto(**TERMS, lambda_near=0.5, personal_epochs=2), "Ditto", ("-mu", "0.5", "-pls", "2")),
    "fedproto": Row(fb.FedProto(**TERMS, lambda_proto=1.0), "FedProto", ("-lam", "1"), sent="combined"),
    "feddistill": Row(fb.FedDistill(**TERMS, gamma=1.0), "FD", ("-lam", "1")),
    "lg_fedavg": Row(fb.LG_FedAvg(**TERMS), "LG-FedAvg", sent="combined"),
    "fml": Row(fb.FML(**TERMS, alpha=0.5, beta=0.5), "FML", ("-al", "0.5", "-bt", "0.5")),
    "fedkd": Row(fb.FedKD(**TERMS, energy_rounds=15), "FedKD", ("-mlr", str(LR))),
    "fedgen": Row(fb.FedGen(**TERMS), "FedGen", ("-lf", "True", "-nd", "32", "-se", "100", "-glr", "0.1"),
                  sent="combined", same=None),
    "fedgh": Row(fb.FedGH(**TERMS), "FedGH", ("-slr", "0.01"), sent="combined"),
}  # fmt: skip


def patches(watch: Watch) -> Iterator[Any]:
    """Results are not written."""
    servers = importlib.import_module("flcore.servers.serverbase")
    yield mock.patch.object(servers.Server, "save_global_model", lambda server: None)


if __name__ == "__main__":
    main("pfllib", METHODS, patches, __doc__)
