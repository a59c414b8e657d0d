"""tests/gpu needs a CUDA device; without one the folder is not collected."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers.py, when pytest is given this folder alone

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
