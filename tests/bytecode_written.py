"""Imported before torch: what is imported is written as bytecode, even where the environment says that it need not be.

Some twenty-five processes of a run import torch, many of them triton as well, and each takes three seconds more where
it has to compile them. Images of containers set PYTHONDONTWRITEBYTECODE, and the Makefile installs without bytecode.
"""

import os
import sys

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
