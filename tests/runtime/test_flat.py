from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlplace.runtime.flat import FlatLayout


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), parts=st.integers(1, 4))
def test_spans_of_all_parts_are_every_element_once(sizes: list[int], parts: int) -> None:
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    layout = FlatLayout(params, parts)
    flat = torch.arange(float(layout.size))
    each = layout.size // parts
    assert each * parts == layout.size < layout.used + parts

    found = torch.full((layout.used,), -1.0)
    views = dict(zip(map(id, params), layout.views(found), strict=True))
    for part, own in enumerate(torch.split(flat, each)):
        for span in layout.spans(part * each, (part + 1) * each):
            views[id(span.param)][span.start : span.stop] = span.of(own)

    assert torch.equal(found, flat[: layout.used])
