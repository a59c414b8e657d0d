"""tilewise inside other libraries: one module for each, which importing tilewise does not import.

`flash_attn` and `evoformer` have functions of other libraries and do not import them; the other modules import theirs.
`pytorch` has `tilewise.sdpa`, and `flex` FlexAttention's function.
"""
