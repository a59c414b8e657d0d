"""``tilewise bench``: tilewise and alternatives in one run, against the device's calibrated limits.

cases       named shapes of attention
operators   cases and providers of softmax and matmul
packed      cases of packed batches; packed_peers: their providers
providers   tilewise's backends and their peers
reference   the reference result, against which every provider is checked before timing
timing      clock, memory measurement and calibration
run         the loop over cases and providers
results     dataclasses of results and their JSON
report      tables for the terminal and for Markdown
plot        pictures
command     the command line (typer); ``python -m tilewise_tools.bench`` is the same run without typer
"""
