"""Reading and checking the arguments of public functions.

arguments  reader of the arguments of `tilewise.attention`
call_cache cache of calls by the layouts of their tensors
leading    more leading dimensions than one batch dimension
jagged     nested tensors
varlen     packed batches
autocast   dtypes under `torch.autocast`
keywords   hints for keywords of other libraries
"""
