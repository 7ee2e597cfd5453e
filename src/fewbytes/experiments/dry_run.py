"""What would leave a node: one round on its own data, in this process. Nothing is sent."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from fewbytes.base.clock import minute
from fewbytes.base.errors import UserError, cleaned
from fewbytes.core.policy import Excluded, Policy
from fewbytes.core.site_policy import HIDING, History, Request, withheld
from fewbytes.experiments.app import serve_client
from fewbytes.experiments.config_file import read_experiment
from fewbytes.experiments.run import run
from fewbytes.experiments.settings import make_experiment
from fewbytes.flower.gate import policy_of
from fewbytes.methods import registered
from fewbytes.wire.frame import Parsed
from fewbytes.wire.inspect import lines_of


def would_leave(config: Path, node: Mapping[str, Any]) -> Iterator[str]:
    """Train one round as this node would, by the settings of a run's config.toml, and describe in lines what would
    leave: bytes, fields and entries, and what the site's policy says of it. `node`: the node's configuration.

    Raises UserError for a config or data that cannot be used, and for a node that does not say whose data it has.
    """
    policy, me = policy_of(node), node.get("partition-id")
    if me is None and "member" in node:  # which client it is in a run is the server's to say: the first one here
        me, node = 0, {**node, "partition-id": 0}
    if me is None:
        raise UserError("a dry run needs the number of the client whose data are here: set partition-id")
    served = serve_client(make_experiment(read_experiment(config)).run_config(), node)
    names = frozenset(map(registered, served.method.runs()))
    hides = registered(served.method) == HIDING  # all of the method's replies; a survey hides only its sums
    method = served.method.runs()[-1] if hides else served.method
    kinds = {each.reply.__name__: each.reply for each in method.handlers() if each.reply is not None}
    others = Excluded(i for i in served.task.problem.clients if i != int(me))
    terms = served.task.problem.privacy
    secret = terms is not None and terms.privacy.noise != "seeded"
    with tempfile.TemporaryDirectory() as name:
        folder, trained = Path(name) / "dry-run", StringIO()
        how = Policy(exclude=others or None, min_replies=1e-6)
        with redirect_stdout(trained):
            run(method, served.task, rounds=1, out=folder, keep_frames=True, policy=how, workers=1)
        frames = sorted(folder.glob(f"frames/*-{int(me)}-up.frame"))
        for path in frames:
            t, handler = path.name.split("-")[:2]
            request = Request(
                "dry-run", int(t), handler, "", names, len(served.task.data.clients[int(me)].train), True,
                hidden=HIDING in names,
                privacy=(terms.privacy.epsilon, terms.privacy.delta) if terms is not None and secret else None,
                approved=True, minute=minute(),
            )  # fmt: skip
            data = path.read_bytes()
            yield f"round {t}, {handler}: {len(data):,} bytes"
            parsed = Parsed(data)
            yield from (
                f"  {field}: {cleaned(line)}" for field, line in lines_of(parsed.fields, kinds.get(parsed.kind))
            )
            why = withheld(policy, request, len(data), History())
            allows = "the site's policy allows it" + (", once a person there approves the run (ask)" * policy.ask)
            yield f"  {allows}" if why is None else f"  the site declines: {why}"
        if frames and math.isfinite(policy.max_bytes_a_round):
            yield "what is sent beside replies, such as losses and scores, counts for max-bytes-a-round, too"
        if not frames:
            yield "nothing would leave in the first round"
    if hides:
        yield "under secure aggregation, the server would see only the sum of this and others' replies"
