"""Block-sparse masks: `tilewise.TileMask` and the functions that make one."""
