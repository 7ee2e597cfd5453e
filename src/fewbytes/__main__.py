"""`fewbytes`, and `python -m fewbytes`, are the command line."""

import os
import sys

if sys.path[0] in ("", os.getcwd()):  # by `python -m`: what lies in the current folder stands for no library
    sys.path.pop(0)


def main() -> None:
    """Run the command line; an interruption while it is loaded ends it as quietly as one later does."""
    try:
        if sys.argv[1:] in ([], ["-h"], ["--help"]):  # at once, without what commands need
            from fewbytes.cli.overview import page

            print(page())
            sys.exit(0)
        if sys.argv[1:] == ["--version"]:
            from importlib.metadata import version

            print(version("fewbytes"))
            sys.exit(0)
        from fewbytes.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
