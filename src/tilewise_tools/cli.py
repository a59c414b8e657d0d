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

# Each module defines `command`: a function whose signature gives the options and whose docstring gives the help, or a
# typer application with subcommands. Every command, --help included, imports all of these modules, so they import
# torch and other heavy packages only when they run.
COMMANDS = {
    "demo": "tilewise_tools.demo.command",
    "bench": "tilewise_tools.bench.command",
    "explain": "tilewise_tools.commands.explain",
    "layout": "tilewise_tools.commands.layout",
    "doctor": "tilewise_tools.commands.doctor",
}


def main() -> None:
    """Run the command line and exit with the command's status; a usage error exits with 2."""
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
    """Return the typer application with all `COMMANDS`."""
    import typer

    # Plain help and errors: rich's frames cut options off in a narrow terminal and break messages that are piped.
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

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
        """Exact, tiled attention for PyTorch, with first-class additive bias and masks."""

    for name, module in COMMANDS.items():
        command = importlib.import_module(module).command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app
