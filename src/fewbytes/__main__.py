"""`fewbytes`, and `python -m fewbytes`, are the command line."""

import sys


def main() -> None:
    """Run the command line; an interruption while it is loaded ends it as quietly as one later does."""
    try:
        from fewbytes.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
