"""Signatures of the API pages as `inspect.signature` shows them, without arguments that are only there to be rejected.

A function takes ``*others`` and ``**unknown`` to name a wrong argument in its error, and ``**numbers`` has two names.
"""

from __future__ import annotations

from typing import Any

import griffe

POSITIONAL, NAMED = griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword
NUMBERS = ("scale", "softcap")  # tilewise.spec.score.Numbers


def shown(parameters: list[griffe.Parameter]) -> list[griffe.Parameter]:
    found: list[griffe.Parameter] = []
    for parameter in parameters:
        if parameter.kind is POSITIONAL and parameter.name == "others":
            for required in found:
                required.default = None
        elif parameter.kind is NAMED and parameter.name == "numbers":
            kind = griffe.ParameterKind.keyword_only
            found += [griffe.Parameter(x, annotation="float | None", kind=kind, default="None") for x in NUMBERS]
        elif parameter.kind is not NAMED or parameter.name != "unknown":
            found.append(parameter)
    return found


class Signatures(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **more: Any) -> None:
        func.parameters = griffe.Parameters(*shown(list(func.parameters)))
