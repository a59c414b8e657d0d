"""tilewise inside other libraries, each in a module of its own, which importing tilewise does not import.

`flash_attn` and `evoformer` need no library: they have the functions of some. The others import theirs.
"""
