"""What gathering weights in slices costs and saves (operator splitting, OSDP, arXiv 2209.13258).

Slices of rows of a weight give columns of a ``linear``, which are joined, and summands of an
``mm``, which are added up. The other factor, or the result, is read or written for every slice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rlplace.graph.types import Affine, Product, Weight, Work
from rlplace.plan.types import GroupChoice


def whole_share(work: Work, choice: GroupChoice) -> float:
    """Share of a group's parameters that is whole at a time (0 to 1).

    All of them, or two steps that follow each other: a slice, and the next one or what stays whole.
    """
    cut = [one.elements for one in work.weights if choice.cuts(one)]
    if not cut:
        return 1.0
    every, largest = work.params + work.frozen_params, max(cut) / choice.slices
    return (largest + max(largest, every - sum(cut))) / every


def in_slices(work: Work, choice: GroupChoice) -> Work:
    """The work of a group whose matmuls are as many as there are slices, each so much smaller."""
    alike = Counter(replace(one, param=0, bias=0) for one in work.weights if choice.cuts(one))
    products: list[Product] = []
    moved = {"forward": Affine(), "input": Affine(), "weight": Affine()}
    for product in work.products:
        weight = next((one for one in alike if _cut_dim(product, one)), None)
        if weight is None:
            products.append(product)
            continue
        own, rest, extra = _cut(product, weight, alike[weight], choice.slices)
        products += [own, rest] if rest.count else [own]
        moved[product.role] = moved[product.role] + extra
    # Slices of a linear are joined by a kernel, those of others added up.
    more = choice.slices - 1
    kernels = sum(n * (choice.slices if one.linear else 2 * more) for one, n in alike.items())
    backward = moved["input"] + moved["weight"]
    return replace(
        work,
        matmuls=work.matmuls + more * alike.total(),
        kernels=work.kernels + kernels,
        fused_kernels=work.fused_kernels + kernels,
        moved=work.moved + moved["forward"],
        fused_moved=work.fused_moved + moved["forward"],
        backward_moved=work.backward_moved + backward,
        fused_backward_moved=work.fused_backward_moved + backward,
        products=tuple(products),
    )


def _cut(
    product: Product, weight: Weight, alike: int, slices: int
) -> tuple[Product, Product, Affine]:
    """The kernels of some equal weights in slices, the other kernels, and what moves in addition.

    Of a linear columns are joined forward and gradients added up backward; of others the other way
    round. A join reads and writes, an addition reads two and writes.
    """
    count = min(alike, product.count)
    part = count / product.count
    rows = (product.depth if product.role == "weight" else product.rows) * float(count)
    again = rows * float(weight.columns * (slices - 1))
    own = replace(
        product,
        count=count * slices,
        flops=product.flops * part,
        moved=product.moved * part + again,
        **{_cut_dim(product, weight): Affine(weight.rows / slices)},  # type: ignore[arg-type]  # a size
    )
    rest = replace(
        product,
        count=product.count - count,
        flops=product.flops * (1.0 - part),
        moved=product.moved * (1.0 - part),
    )
    if product.role == "weight":
        return own, rest, again
    joins = (product.role == "forward") == weight.linear
    whole = 2 * weight.rows if joins else 3 * weight.columns * (slices - 1)
    return own, rest, again + rows * float(whole)


def _cut_dim(product: Product, weight: Weight) -> str:
    """Which size of a product the rows of a weight are; empty if the weight is not in it."""
    across, along = ("columns", "depth") if weight.linear else ("depth", "columns")
    dims = {
        "forward": (across, along),
        "input": (along, across),
        "weight": ("rows", "columns"),
    }[product.role]
    sizes = tuple(getattr(product, dim) for dim in dims)
    found = product.kind == "matmul" and sizes == (Affine(weight.rows), Affine(weight.columns))
    return dims[0] if found else ""
