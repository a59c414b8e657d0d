"""Tools on top of the library, which imports none of them: command line, benchmarks, demo.

cli          the command ``tilewise``
commands     its commands ``explain``, ``layout`` and ``doctor``
demo         its command ``demo``
bench        its command ``bench``, and the cases, providers and results files of benchmarks
benchmarks   scripts for single questions, each run by ``python -m tilewise_tools.benchmarks.NAME``
"""
