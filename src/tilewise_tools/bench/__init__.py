"""``tilewise bench``: tilewise beside what one would use instead, in one run, against the device's own limits.

cases       what is computed: named shapes of attention
operators   the same of the other operators, softmax and matmul, and who computes them
packed      the same of packed batches, of many lengths; packed_peers: who computes them
providers   who computes it: tilewise's backends and their peers
reference   the right answer, which everybody is held to before the clock starts
timing      the clock, the memory gauge and the calibration
run         the loop over cases and providers
results     what came out: dataclasses and their JSON
report      tables in the terminal and in Markdown
plot        pictures
command     the command line (typer); ``python -m tilewise_tools.bench`` is the same run without typer
"""
