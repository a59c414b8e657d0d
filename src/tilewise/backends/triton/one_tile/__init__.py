"""Attention of many short sequences, each in one tile: the windows of a Swin transformer, small graphs."""
