"""The arguments of public functions, read and checked: adapters from what users pass to what is computed.

call      the reader of `tilewise.attention` and its like, and the cache of calls
leading   more leading dimensions than one batch dimension
jagged    nested tensors
autocast  the dtypes that `torch.autocast` asks for
keywords  hints for keywords of other libraries
"""
