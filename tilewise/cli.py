"""The command line, ``tilewise`` or ``python -m tilewise``: one module for each command."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

# Each module has a `command`: a function whose signature is the command's options and whose docstring is its help, or a
# typer application with commands of its own. These modules are imported for every command, --help included, so they
# import torch and its like only when they run.
COMMANDS = {
    "demo": "tilewise.demo.command",
    "bench": "tilewise.bench.command",
    "explain": "tilewise.commands.explain",
    "layout": "tilewise.commands.layout",
    "doctor": "tilewise.commands.doctor",
}


def main() -> None:
    """Entry point. Ends the process with the command's status; 2 for a mistake in how it was called."""
    if importlib.util.find_spec("typer") is None:
        print("tilewise: the command line needs typer: pip install 'tilewise[cli]'", file=sys.stderr)
        sys.exit(2)
    make_app()(prog_name="tilewise")


def make_app() -> Typer:
    """The typer application with all `COMMANDS`."""
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def tilewise() -> None:
        """Exact attention for PyTorch, tile by tile, in which additive bias and masks are first class."""

    for name, module in COMMANDS.items():
        command = importlib.import_module(module).command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app
