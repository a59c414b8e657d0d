"""What is kept from call to call: no tensor of a call, nothing that another stream has yet to write, and no more under
threads than without."""

from __future__ import annotations

import torch

from tilewise import attention
from tilewise.bias import alibi, t5_bias

# --- streams ---


def test_constants_are_of_one_stream(monkeypatch):
    """No stream reads what another may not have written yet."""
    from tilewise.bias import constants

    q, k, v, table = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(32, 2)
    streams, made = iter((1, 2, 1, 2)), []
    monkeypatch.setattr(constants, "_kept", {})
    for stream in streams:
        monkeypatch.setattr(constants, "stream_of", lambda device, stream=stream: stream)
        attention(q, k, v, bias=t5_bias(table, True))
        made.append([x.data_ptr() for x in constants._kept.values()])
    assert [len(x) for x in made] == [1, 2, 2, 2]
    assert made[1] == made[3]


def test_biases_by_lengths_keep_nothing(monkeypatch):
    from tilewise.bias import constants

    monkeypatch.setattr(constants, "_kept", {})
    for n in (9, 10, 11):
        slopes = torch.randn(2).requires_grad_()
        attention(*(torch.randn(1, 2, n, 8) for _ in range(3)), bias=alibi(slopes)).sum().backward()
    assert constants._kept == {}
