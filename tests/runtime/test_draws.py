from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.program import export_program
from rlplace.graph.sharding.nodes import op_name
from rlplace.runtime.draws import Stream, drawing, draws, seed_of

CPU = torch.device("cpu")


class Random(nn.Module):
    """Draws in three ways, two of which are off."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.dropout(x, 0.0), 0.5)
        x = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1) + torch.rand_like(x)


def test_a_seed_depends_on_each_number_and_their_order() -> None:
    seeds = {seed_of(*numbers) for numbers in ((0, 1, 2), (0, 2, 1), (0, 1, 3), (1, 1, 2), (0, 1))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(3, 4) == 6807787904548242825


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with drawing(7, CPU):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    with drawing(7, CPU):
        assert torch.equal(torch.rand(3), first)


def test_parts_go_on_where_the_part_before_them_was() -> None:
    with drawing(7, CPU):
        wanted = torch.rand(3), torch.rand(2), torch.rand(4)
    stream, found = Stream(), []
    for at, count in enumerate((3, 2, 4)):
        torch.rand(5)
        with drawing(7, CPU, stream, goes_on=at > 0):
            found.append(torch.rand(count))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with drawing(7, CPU, stream):
        assert torch.equal(torch.rand(3), wanted[0]), "the first part begins anew"


def test_only_ops_that_draw_are_found() -> None:
    program = export_program(Random().train(), (), {"x": torch.zeros(2, 3, 4, 8)})
    found = [op_name(node) for node in program.nodes if draws(node)]
    assert sorted(found) == ["dropout", "rand_like", "scaled_dot_product_attention"]
