"""Tools above the library: the command line, the benchmarks, the demo. The library imports none of them.

cli          the command ``tilewise``
commands     its commands ``explain``, ``layout`` and ``doctor``
demo         its command ``demo``
bench        its command ``bench``, and the cases, providers and results files of benchmarks
benchmarks   scripts for single questions, each run by ``python -m tilewise_tools.benchmarks.NAME``
"""
