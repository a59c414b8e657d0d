"""What a repeated call of a packed batch costs the host beside a dense one: Python frames, launches, views."""

from __future__ import annotations

from functools import cache

import pytest
from host_child import repeated
from processes import call

pytest.importorskip("triton")

# Frames more than a dense call's: forward, both passes.
FRAMES = {"varlen_attention": (10, 24), "varlen_attn": (14, 28), "flash_attn": (14, 28)}
VIEWS = ("causal", "sink", "along the keys", "along the queries", "mask", "dropout", "alibi", "t5_bias")


@cache
def found():
    return call(repeated, "attention", *FRAMES, *VIEWS, environment={})


@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_a_repeated_call(name):
    """Neither the caller's arguments nor views of tensors take more."""
    for packed, dense, more in zip(found()[name].frames, found()["attention"].frames, FRAMES[name], strict=True):
        assert packed <= dense + more


@pytest.mark.parametrize("name", FRAMES)
def test_launches_of_a_repeated_call(name):
    """One list of tiles more, made anew in each pass: the offsets may have changed."""
    forward, both = found()[name].kernels
    assert forward == ["tiles_kernel", "forward_kernel"]
    assert both == [*forward, "both_lists_kernel", "packed_preprocess_kernel", "backward_kernel"]


@pytest.mark.parametrize("name", [*FRAMES, *VIEWS])
def test_results_have_the_shapes_and_strides_of_an_uncached_call(name):
    assert found()[name].layouts == found()[name].alone
