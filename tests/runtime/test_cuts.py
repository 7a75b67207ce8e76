from __future__ import annotations

import torch
from torch import nn

from rlplace.runtime.cuts import Trained, cut


def trained(*zeros: int, size: int = 2) -> list[Trained]:
    count = len(zeros)
    return [
        Trained(nn.Parameter(torch.zeros(size)), ((0, count - index),), zero)
        for index, zero in enumerate(zeros)
    ]


def test_levels_that_alternate_share_buckets() -> None:
    params = trained(0, 1, 0, 1)
    first, second = cut(params, 1000, (), shards=True)
    assert first == params[0::2]
    assert second == params[1::2]


def test_without_shards_there_are_no_levels() -> None:
    assert len(cut(trained(0, 1, 2, 3), 1000, (), shards=False)) == 1


def test_lent_parameters_are_together_where_they_are_used_together() -> None:
    params = trained(3, 3)
    beside = Trained(nn.Parameter(torch.zeros(100)), params[0].uses, 3)
    runs = cut([*params, beside], 10, (), shards=True)
    assert runs == [[params[1]], [params[0], beside]]


def test_a_bucket_has_one_kind_of_setting() -> None:
    params = trained(0, 0)
    other = Trained(params[0].param, settings=(("weight_decay", 0.0),))
    assert cut([other, params[1]], 1000, (), shards=True) == [[other], [params[1]]]


def test_a_bucket_is_closed_at_its_limit() -> None:
    params = trained(0, 0, 0, 0)
    assert [len(run) for run in cut(params, 16, (), shards=False)] == [2, 2]
    assert len(cut(params, 16, {id(params[0].param)}, shards=False)[0]) == 1
