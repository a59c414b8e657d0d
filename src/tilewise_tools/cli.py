"""The command line, ``tilewise`` or ``python -m tilewise``: one module for each command."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from typing import TYPE_CHECKING

from tilewise import __version__

if TYPE_CHECKING:
    from typer import Typer

# Each module has a `command`: a function whose signature is the command's options and whose docstring is its help, or a
# typer application with commands of its own. These modules are imported for every command, --help included, so they
# import torch and its like only when they run.
COMMANDS = {
    "demo": "tilewise_tools.demo.command",
    "bench": "tilewise_tools.bench.command",
    "explain": "tilewise_tools.commands.explain",
    "layout": "tilewise_tools.commands.layout",
    "doctor": "tilewise_tools.commands.doctor",
}


def main() -> None:
    """Entry point. Ends the process with the command's status; 2 for a mistake in how it was called."""
    if importlib.util.find_spec("typer") is None:
        print(
            "tilewise: the command line needs typer: in a checkout of tilewise, pip install '.[cli]'", file=sys.stderr
        )
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or file in another encoding may lack a dash or a µ
            stream.reconfigure(errors="replace")
    make_app()(prog_name="tilewise")


def make_app() -> Typer:
    """The typer application with all `COMMANDS`."""
    import typer

    # Plain help and errors: rich's frames cut options off in a narrow terminal and break messages that are piped.
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"tilewise {__version__}")
            raise typer.Exit

    @app.callback()
    def tilewise(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ) -> None:
        """Exact attention for PyTorch, tile by tile, in which additive bias and masks are first class."""

    for name, module in COMMANDS.items():
        command = importlib.import_module(module).command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app
