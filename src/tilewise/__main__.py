"""Run the command line: ``python -m tilewise`` is the command ``tilewise``."""

from __future__ import annotations

import sys


def main() -> None:
    """Start `tilewise_tools.cli`. Exit with status 2 if the tools are not installed beside the library."""
    try:
        from tilewise_tools.cli import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "tilewise_tools":
            raise
        print("tilewise: the command line needs the package tilewise_tools, which is not installed", file=sys.stderr)
        sys.exit(2)
    command()


if __name__ == "__main__":
    main()
