"""A graph between two ends gives the gradients of a plain one, and does not keep its ends."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from rlplace.runtime.ends import entering, leaving, run_backward

SIZE = 64


def watched(tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


def test_gradients_are_those_of_a_graph_that_begins_with_leaves() -> None:
    x, mask = torch.randn(SIZE), torch.ones(SIZE, dtype=torch.bool)
    seed = torch.randn(SIZE)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(leaf.tanh() * leaf, leaf, seed)
    received, back = entering({"x": x, "mask": mask}, ["x"])
    assert received["mask"] is mask
    assert torch.equal(back["x"], torch.zeros(SIZE))
    edges = leaving({"y": received["x"].tanh() * received["x"], "mask": mask})
    run_backward(edges, {"y": seed})
    assert torch.equal(back["x"], wanted)
    assert list(edges) == ["y"]


def test_a_tensor_that_is_handed_on_as_it_came_gets_its_gradient() -> None:
    received, back = entering({"x": torch.randn(SIZE), "unused": torch.randn(3)}, ["x", "unused"])
    edges = leaving(received)
    run_backward(edges, {"x": torch.full((SIZE,), 2.0)})
    assert torch.equal(back["x"], torch.full((SIZE,), 2.0))
    assert torch.equal(back["unused"], torch.zeros(3))


def test_neither_end_is_kept() -> None:
    weight = torch.randn(SIZE, requires_grad=True)
    first = torch.randn(SIZE)
    received, back = entering({"x": first}, ["x"])
    product = received["x"] + weight  # a sum saves nothing
    given = {"sum": product, "square": product.square()}  # a square saves what it is of
    kept, gone = watched(product), [watched(first), watched(given["square"])]
    edges = leaving(given)
    del first, received, product, given
    assert [one() for one in gone] == [None, None]
    assert kept() is not None
    run_backward(edges, {"square": torch.ones(SIZE), "sum": torch.ones(SIZE)})
    assert kept() is None
    assert weight.grad is not None
    assert torch.equal(back["x"], weight.grad)


def test_a_graph_may_begin_with_nothing() -> None:
    mask = {"mask": torch.ones(2, dtype=torch.bool)}
    received, back = entering(mask, [])
    assert (received, back) == (mask, {})
    run_backward(leaving(received), {})
