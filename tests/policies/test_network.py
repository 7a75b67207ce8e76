from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.envs.types import Candidates, InstanceView
from rlplace.errors import InputError
from rlplace.policies.convolution_pyg import GraphConv
from rlplace.policies.encoder import Encoding, ViewBatch
from rlplace.policies.network import PlaceNet, untrained
from rlplace.policies.scorer import RowBatch
from rlplace.policies.types import NetConfig, Rows

States = list[tuple[InstanceView, Candidates, int]]


def test_untrained_network_is_the_heuristic(toy_states: States) -> None:
    net = untrained(NetConfig(scale=7.0))
    for view, candidates, step in toy_states:
        (log_probs,) = net.score(net.encode(view), [candidates], step)
        heuristic = np.where(candidates.mask, 7.0 * candidates.features[:, 0], -np.inf)
        expected = heuristic - np.logaddexp.reduce(heuristic)
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def test_masked_candidates_have_no_probability(toy_states: States, trained_like: PlaceNet) -> None:
    view, candidates, step = toy_states[0]
    mask = np.arange(len(candidates.mask)) == 1
    (log_probs,) = trained_like.score(
        trained_like.encode(view), [replace(candidates, mask=mask)], step
    )
    assert log_probs.tolist() == [0.0 if legal else -np.inf for legal in mask]


def test_candidates_permute_with_their_scores(toy_states: States, trained_like: PlaceNet) -> None:
    for view, candidates, step in toy_states:
        order = np.random.default_rng(0).permutation(len(candidates.mask))
        shuffled = Candidates(
            candidates.features[order], candidates.spans[order], candidates.mask[order]
        )
        encoding = trained_like.encode(view)
        plain, permuted = trained_like.score(encoding, [candidates, shuffled], step)
        np.testing.assert_allclose(permuted, plain[order], atol=1e-5)


def test_renumbered_hosts_change_no_score(toy_states: States, trained_like: PlaceNet) -> None:
    for view, candidates, step in toy_states:
        order = np.random.default_rng(1).permutation(len(view.device_features))
        place = np.argsort(order)
        renumbered = replace(
            view, device_features=view.device_features[order], device_edges=place[view.device_edges]
        )
        spans = candidates.spans.copy()
        spans[:, 2] = place[candidates.spans[:, 2]]
        spans[:, 3] = spans[:, 2] + 1
        (before,) = trained_like.score(trained_like.encode(view), [candidates], step)
        (after,) = trained_like.score(
            trained_like.encode(renumbered), [replace(candidates, spans=spans)], step
        )
        np.testing.assert_allclose(after, before, atol=1e-5)


def test_encoding_in_company_equals_encoding_alone(
    toy_states: States, trained_like: PlaceNet
) -> None:
    views = [view for view, _, _ in toy_states]
    with torch.no_grad():
        together: Encoding = trained_like.encoder(ViewBatch.join(views))
    for number, view in enumerate(views):
        alone, part = trained_like.encode(view), together.part(number)
        for name in ("groups", "hosts", "context"):
            # Prefix sums of a batch go on from instance to instance; only differences count.
            rows = [getattr(e, name) for e in (alone, part)]
            if name != "context":
                rows = [sums - sums[:1] for sums in rows]
            torch.testing.assert_close(rows[0], rows[1], atol=1e-5, rtol=0)


def test_joined_encodings_score_as_the_batch(toy_states: States, trained_like: PlaceNet) -> None:
    views = [view for view, _, _ in toy_states]
    count = len(views)
    steps = np.array([step for _, _, step in toy_states])
    rows = Rows.gather([c for _, c, _ in toy_states], steps, np.arange(count))
    with torch.no_grad():
        batch = trained_like.encoder(ViewBatch.join(views))
        joined = Encoding.join([trained_like.encode(view) for view in views])
        first, value = trained_like(batch, RowBatch.of(rows))
        second, other_value = trained_like(joined, RowBatch.of(rows))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)
    torch.testing.assert_close(value, other_value, atol=1e-5, rtol=0)


def test_plain_and_pyg_layers_agree(toy_states: States, trained_like: PlaceNet) -> None:
    pyg = PlaceNet(trained_like.config, GraphConv)
    pyg.load_state_dict(trained_like.state_dict())
    batch = ViewBatch.join([view for view, _, _ in toy_states])
    plain_out, pyg_out = trained_like.encoder(batch), pyg.encoder(batch)
    for name in ("groups", "hosts", "context"):
        torch.testing.assert_close(getattr(plain_out, name), getattr(pyg_out, name))
    pyg_out.context.sum().backward()
    trained_like.zero_grad()
    plain_out.context.sum().backward()
    for (name, mine), theirs in zip(
        trained_like.encoder.named_parameters(), pyg.encoder.parameters(), strict=True
    ):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    trained_like.zero_grad()


def test_graphs_without_edges_are_encoded(toy_states: States, trained_like: PlaceNet) -> None:
    view = toy_states[0][0]
    single = replace(
        view,
        op_features=view.op_features[:1],
        op_edges=view.op_edges[:, :0],
        op_edge_features=view.op_edge_features[:0],
        device_features=view.device_features[:1],
        device_edges=view.device_edges[:, :0],
        device_edge_features=view.device_edge_features[:0],
    )
    encoding = trained_like.encode(single)
    assert encoding.groups.shape[0] == 2
    assert bool(torch.isfinite(encoding.context).all())


def test_critic_does_not_shape_the_encoder(toy_states: States, trained_like: PlaceNet) -> None:
    view, candidates, step = toy_states[0]
    rows = Rows.gather([candidates], np.array([step]), np.array([0]))
    encoding = trained_like.encoder(ViewBatch.join([view]))
    _, values = trained_like(encoding, RowBatch.of(rows))
    trained_like.zero_grad()
    values.sum().backward()
    assert all(p.grad is None for p in trained_like.encoder.parameters())
    assert any(p.grad is not None and p.grad.any() for p in trained_like.scorer.critic.parameters())
    trained_like.zero_grad()


def test_heads_that_do_not_divide_are_refused() -> None:
    options: dict[str, Any] = {"width": 30, "heads": 4}
    with pytest.raises(InputError, match="must divide the width 30") as error:
        PlaceNet(NetConfig(**options))
    assert error.value.nearest == 2
