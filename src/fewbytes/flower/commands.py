"""`flwr` commands one after another in one process: to load Flower takes a second, to run a command milliseconds.

`python -m fewbytes.flower.commands` reads a command's arguments as a line of JSON, and ends what it prints with END.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from fewbytes.flower import compat

END = "-- end of the answer --"


def main() -> None:
    """Run what standard input says, until it ends."""
    run = compat.flwr_commands()
    for line in sys.stdin:
        with suppress(SystemExit):
            run(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        print(f"\n{END}", flush=True)


if __name__ == "__main__":
    main()
