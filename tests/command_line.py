"""The command line as tests call it, and what it printed."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from tilewise_tools import cli


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.make_app(), list(map(str, arguments)))


def shown(output: str) -> str:
    """What typer printed, without its line breaks."""
    return " ".join(output.split())
