from __future__ import annotations

import torch
from torch import nn

from rlplace.runtime.buckets import Replicas
from rlplace.runtime.cuts import Trained
from rlplace.runtime.reduce import Reducer


def test_gradients_accumulate_in_flat_buckets() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    torch.autograd.backward(net(x).sum() * 2)
    wanted = [param.grad for param in net.parameters()]
    net.zero_grad()
    params = list(net.parameters())[::-1]
    reducer = Reducer([Trained(param) for param in params], Replicas(), bucket_bytes=100)
    for _ in range(2):
        reducer.start()
        for last in (False, True):
            with reducer.backward(0, set(map(id, params)) if last else ()):
                torch.autograd.backward(net(x).sum())
        reducer.finish()
        for param, grad in zip(net.parameters(), wanted, strict=True):
            assert grad is not None
            torch.testing.assert_close(param.grad, grad)
    assert not reducer.traffic
    assert reducer.trained == params
    assert reducer.gradient_bytes == 4 * sum(param.numel() for param in params)
    storages = {p.grad.untyped_storage().data_ptr() for p in params if p.grad is not None}
    assert len(storages) == 2


def test_one_dtype_a_bucket() -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.float64)]
    Reducer([Trained(param) for param in params], Replicas())
    first, second = (param.grad for param in params)
    assert first is not None
    assert second is not None
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)
