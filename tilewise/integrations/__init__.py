"""tilewise inside other libraries, each in a module of its own, which importing tilewise does not import.

`flash_attn` needs no library: it has the functions of one. The others import theirs.
"""
