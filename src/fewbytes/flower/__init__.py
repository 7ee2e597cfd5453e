"""Methods on Flower: its simulation and its deployments. Nothing else imports flwr."""

import os

from fewbytes.base.extras import needs

needs("Flower", "flower", "flwr")

from fewbytes.flower.private.programs import QUIET  # noqa: E402

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)  # before any module imports flwr
