"""FlexAttention's score_mod as arguments of `tilewise.attention`.

symbols   stand-ins for the indices of a score, which record what is done to them
score     stand-in for a score: the operations that it allows, and `traced`
values    numbers and views of what was recorded
terms     bias terms for what it adds
visible   masks and windows for what it hides
"""
