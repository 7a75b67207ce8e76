"""The network in numpy, for zero-shot plans: importing torch would cost more than the plan.

Reads the same files as `rlplace.policies.network.PlaceNet` and gives the same answers to about
1e-5 (a test holds it to that). The names of weights are those of the torch modules; look there
for what a step means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlplace.envs.types import Candidates, FloatArray, InstanceView, IntArray
from rlplace.policies.types import (
    STEP_FEATURES,
    DoubleArray,
    NetConfig,
    Rows,
    step_features,
)


@dataclass(frozen=True)
class NumpyEncoding:
    """One encoded instance: prefix sums led by a row of zeros, and the context (W,)."""

    groups: DoubleArray
    hosts: DoubleArray
    context: FloatArray


class NumpyNet:
    """A `rlplace.policies.types.ScoreNetwork` without torch.

    Args:
        config: Shape of the network.
        weights: By the names of the torch modules.
    """

    def __init__(self, config: NetConfig, weights: dict[str, npt.NDArray[np.float32]]) -> None:
        self.config = config
        self._weights = weights

    def encode(self, view: InstanceView) -> NumpyEncoding:
        """The encoding of one instance."""
        alone_ops = self._graph("ops", view.op_features, view.op_edges, view.op_edge_features)
        alone_hosts = self._graph(
            "hosts", view.device_features, view.device_edges, view.device_edge_features
        )
        ops = self._look("ops_see_hosts", alone_ops, alone_hosts)
        hosts = self._look("hosts_see_ops", alone_hosts, alone_ops)
        pooled = [_relu(self._linear("encoder.globals", view.globals))]
        for state, name in ((ops, "encoder.op_logit"), (hosts, "encoder.host_logit")):
            weights = _softmax(self._linear(name, state), axis=0)
            pooled += [state.mean(axis=0), (state * weights).sum(axis=0)]
        context = _relu(self._linear("encoder.context", np.concatenate(pooled)))
        return NumpyEncoding(_prefix_sums(ops), _prefix_sums(hosts), context)

    def score(
        self, encoding: NumpyEncoding, candidates: Sequence[Candidates], step: int
    ) -> list[FloatArray]:
        """Log-probabilities of the candidates of several states; see `ScoreNetwork.score`."""
        steps = np.full(len(candidates), step)
        rows = Rows.gather(candidates, steps, np.zeros_like(steps))
        states, stops = len(steps), np.cumsum(np.bincount(rows.owner, minlength=len(steps)))
        heuristic = np.exp(self._weights["scorer.log_scale"]) * rows.features[:, 0]
        context = np.broadcast_to(encoding.context, (states, len(encoding.context)))
        known = np.concatenate([context, step_features(steps)], axis=1)
        covered = [
            _pooled(encoding.groups, rows.spans[:, :2]),
            _pooled(encoding.hosts, rows.spans[:, 2:]),
        ]
        own = self._linear("scorer.row", np.concatenate([rows.features, *covered], axis=1))
        own = _relu(own + self._linear("scorer.state", known)[rows.owner])
        slices = [
            slice(stop - size, stop)
            for stop, size in zip(stops, np.diff(stops, prepend=0), strict=True)
        ]
        best = [_softmax(heuristic[s, None], axis=0) for s in slices]
        others = np.stack(
            [
                np.concatenate([own[s].mean(axis=0), (own[s] * weight).sum(axis=0)])
                for s, weight in zip(slices, best, strict=True)
            ]
        )
        pooled = self._linear("scorer.others", others)[rows.owner]
        hidden = _relu(self._linear("scorer.own", own) + pooled)
        scores = heuristic + self._linear("scorer.last", hidden)[:, 0]
        return [
            _log_probs(scores[s], state.mask) for s, state in zip(slices, candidates, strict=True)
        ]

    def _linear(self, name: str, values: FloatArray) -> FloatArray:
        result: FloatArray = values @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _norm(self, name: str, values: FloatArray) -> FloatArray:
        centred = values - values.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        result: FloatArray = scaled * self._weights[f"{name}.weight"]
        return result + self._weights[f"{name}.bias"]

    def _graph(
        self, name: str, nodes: FloatArray, index: IntArray, edges: FloatArray
    ) -> FloatArray:
        prefix = f"encoder.{name}"
        state = _relu(self._linear(f"{prefix}.embed", nodes))
        for number in range(self.config.rounds):
            heard = self._conv(f"{prefix}.along.{number}.core", state, index, edges)
            heard += self._conv(f"{prefix}.against.{number}.core", state, index[::-1], edges)
            state = self._norm(f"{prefix}.norms.{number}", state + _relu(heard))
        return state

    def _conv(self, name: str, nodes: FloatArray, index: IntArray, edges: FloatArray) -> FloatArray:
        source, target = index
        projected = self._linear(f"{name}.source", nodes)[source]
        projected += self._linear(f"{name}.target", nodes)[target]
        messages = _relu(projected + self._linear(f"{name}.edge", edges))
        weights = np.exp(_centred(self._linear(f"{name}.logit", messages), target, len(nodes)))
        both = np.concatenate([np.ones_like(weights), weights], axis=1)
        totals = np.maximum(_scatter(both, target, len(nodes)), 1e-30)
        mean = _scatter(messages, target, len(nodes)) / totals[:, :1]
        soft = _scatter(messages * weights, target, len(nodes)) / totals[:, 1:]
        return self._linear(f"{name}.out", np.concatenate([mean, soft], axis=1))

    def _look(self, name: str, state: FloatArray, other: FloatArray) -> FloatArray:
        prefix, heads = f"encoder.{name}", self.config.heads
        query, key, value = (
            self._linear(f"{prefix}.{part}", values).reshape(len(values), heads, -1).swapaxes(0, 1)
            for part, values in (("query", state), ("key", other), ("value", other))
        )
        weights = _softmax(query @ key.swapaxes(1, 2) / np.float32(np.sqrt(query.shape[-1])), -1)
        seen = (weights @ value).swapaxes(0, 1).reshape(len(state), -1)
        return self._norm(f"{prefix}.norm", state + self._linear(f"{prefix}.out", seen))


def expected_shapes(config: NetConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of a network, as `PlaceNet.state_dict` has them."""
    width, edge = config.width, config.edge_features
    linear = {
        "encoder.globals": (width, config.global_features),
        "encoder.context": (width, 5 * width),
        "encoder.op_logit": (1, width),
        "encoder.host_logit": (1, width),
        "scorer.row": (width, config.candidate_features + 2 * width),
        "scorer.state": (width, width + STEP_FEATURES),
        "scorer.own": (width, width),
        "scorer.others": (width, 2 * width),
        "scorer.last": (1, width),
        "scorer.critic.0": (width, 3 * width + STEP_FEATURES),
        "scorer.critic.2": (1, width),
    }
    shapes: dict[str, tuple[int, ...]] = {"scorer.log_scale": ()}
    norms = []
    for name, features in (("ops", config.op_features), ("hosts", config.device_features)):
        linear[f"encoder.{name}.embed"] = (width, features)
        for number in range(config.rounds):
            norms.append(f"encoder.{name}.norms.{number}")
            for way in ("along", "against"):
                core = f"encoder.{name}.{way}.{number}.core"
                linear |= {f"{core}.source": (width, width), f"{core}.logit": (1, width)}
                linear |= {f"{core}.out": (width, 2 * width)}
                shapes |= {f"{core}.target.weight": (width, width)}
                shapes |= {f"{core}.edge.weight": (width, edge)}
    for name in ("encoder.ops_see_hosts", "encoder.hosts_see_ops"):
        norms.append(f"{name}.norm")
        linear |= {f"{name}.{part}": (width, width) for part in ("query", "key", "value", "out")}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


def _relu(values: FloatArray) -> FloatArray:
    return np.maximum(values, np.float32(0.0))


def _softmax(values: FloatArray, axis: int) -> FloatArray:
    weights: FloatArray = np.exp(values - values.max(axis=axis, keepdims=True))
    result: FloatArray = weights / weights.sum(axis=axis, keepdims=True)
    return result


def _scatter(values: FloatArray, index: IntArray, count: int) -> FloatArray:
    """(count, W): sums of the rows of `values` (E, W) by `index`."""
    order = np.argsort(index, kind="stable")
    result = np.zeros((count, values.shape[1]), dtype=np.float32)
    if len(index):
        present, first = np.unique(index[order], return_index=True)
        result[present] = np.add.reduceat(values[order], first, axis=0)
    return result


def _centred(logits: FloatArray, index: IntArray, count: int) -> FloatArray:
    """(E, 1) logits minus the largest of their node."""
    highest = np.full((count, 1), -np.inf, dtype=np.float32)
    np.maximum.at(highest, index, logits)
    return logits - highest[index]


def _prefix_sums(state: FloatArray) -> DoubleArray:
    sums = np.zeros((len(state) + 1, state.shape[1]))
    np.cumsum(state, axis=0, dtype=np.float64, out=sums[1:])
    return sums


def _pooled(sums: DoubleArray, span: IntArray) -> FloatArray:
    first, stop = span[:, 0], span[:, 1]
    count = np.maximum(stop - first, 1)[:, None]
    pooled: FloatArray = ((sums[stop] - sums[first]) / count).astype(np.float32)
    return pooled


def _log_probs(scores: FloatArray, mask: npt.NDArray[np.bool_]) -> FloatArray:
    full = np.full(len(mask), -np.inf, dtype=np.float32)
    shifted = scores - scores.max()
    full[mask] = shifted - np.log(np.exp(shifted).sum())
    return full
