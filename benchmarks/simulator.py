"""How quick the simulator and an estimate are.

Plans a second of the compiled event simulator (1F1B, with sends, gradient buckets and optimizer)
beside the same loop in plain Python and the same rules as simpy processes, in one run and with
equal step times, for sends beside compute and for sends that block; and milliseconds of an estimate
of Llama-3-70B on 64 and on 1,024 devices: of the first plan, and of a further one that differs in
one stage. Seconds of CPU, the best of several repeats, one thread.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import simpy
from rich.console import Console
from rich.table import Table

from rlplace.cluster.types import Cluster
from rlplace.graph import library
from rlplace.plan.orders import Lanes, levels
from rlplace.plan.schedules import lane_orders
from rlplace.plan.types import Action, Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.flow import flow
from rlplace.simulate.orders import Orders, orders
from rlplace.simulate.timeline import (
    AT_ONCE,
    BESIDE,
    IN_TURN,
    Durations,
    simulate,
    step_times,
)

#: Plans of one compiled call.
_BATCH = 500


def python_step(order: Orders, costs: Durations) -> float:
    """Step time by the loop of the compiled simulator, each lane on a core of its own."""
    turns = order.turns
    lane, price, target, cut, link, meets = (
        column.tolist()
        for column in (turns.lane, turns.price, turns.target, turns.cut, turns.link, turns.meets)
    )
    seconds, transfer, sends = (
        column.tolist() for column in (costs.seconds, costs.transfer, costs.sends)
    )
    lanes, rows = len(costs.optimizer), len(lane)
    free, link_free = [0.0] * lanes, [0.0] * lanes**2
    arrival, start, end = [0.0] * rows, [0.0] * rows, [0.0] * rows
    columns = (turns.meet_due, turns.meet_sender, turns.meet_reader, turns.meet_before)
    meetings = list(zip(*(column.tolist() for column in columns), strict=True))[::-1]
    for at in range(rows):
        while meetings and meetings[-1][0] <= at:
            _, sender, reader, before = meetings.pop()
            way, one, other = cut[sender], lane[sender], lane[reader]
            if sends[way] == BESIDE:
                continue
            begin = max(end[sender], link_free[link[sender]], end[before] if before >= 0 else 0.0)
            if sends[way] == IN_TURN:
                begin = max(begin, free[one], free[other])
            link_free[link[sender]] = arrival[reader] = done = begin + transfer[way]
            free[one], free[other] = max(free[one], done), max(free[other], done)
        begin = max(free[lane[at]], arrival[at])
        done = begin + seconds[price[at]]
        start[at], end[at], free[lane[at]] = begin, done, done
        if target[at] >= 0 and (not meets[at] or sends[cut[at]] == BESIDE):
            done = max(done, link_free[link[at]]) + transfer[cut[at]]
            link_free[link[at]] = arrival[target[at]] = done
    return max(_python_tail(order, costs, own, start, end, free[own]) for own in range(lanes))


def _python_tail(
    order: Orders, costs: Durations, lane: int, start: list[float], end: list[float], last: float
) -> float:
    done, late = 0.0, 0.0
    for stage in order.turns.reduce_stage[slice(*order.turns.reduce_first[lane : lane + 2])]:
        begin, finish = start[order.turns.last[stage]], end[order.turns.last[stage]]
        for bucket in range(costs.bucket_first[stage], costs.bucket_first[stage + 1]):
            ready = begin + float(costs.bucket_ready[bucket]) * (finish - begin)
            done = max(done, ready) + float(costs.bucket_seconds[bucket])
        late += float(costs.late[stage])
    return max(done, last) + late + float(costs.optimizer[lane])


class SimpyStep:
    """The same rules as simpy processes: a lane a stage, a resource a link and a reduction channel.

    For schedules in which every lane that blocks is met in the end, as those of 1F1B are.

    Args:
        lanes: Action lists; stage s is on lane s.
        costs: Seconds of everything; all sends are of one kind.
    """

    def __init__(self, lanes: Lanes, costs: Durations) -> None:
        self.costs, self.lanes = costs, lanes
        self.sends = int(costs.sends[0]) if len(costs.sends) else BESIDE
        self.env = simpy.Environment()
        self.links: dict[tuple[int, int], simpy.Resource] = {}
        self.level = {
            action: level
            for lane, found in zip(lanes, levels(lanes), strict=True)
            for action, level in zip(lane, found, strict=True)
        }
        crossing = [a for lane in lanes for a in lane if 0 <= a.stage - _STEP[a.kind] < len(lanes)]
        self.arrived: dict[Action, simpy.Event] = {a: self.env.event() for a in crossing}
        #: Sender and receiver of what an action reads, once they are there.
        self.there = {a: (self.env.event(), self.env.event()) for a in crossing}

    def run(self) -> float:
        """The step time."""
        for index in range(len(self.lanes)):
            self.env.process(self._lane(index))
        for action in self.there if self.sends != BESIDE else ():
            self.env.process(self._meeting(action))
        self.env.run()
        return float(self.env.now)

    def _lane(self, index: int) -> Generator[Any, Any, None]:
        env, costs, own = self.env, self.costs, self.lanes[index]
        reduction = None
        for number, action in enumerate(own):
            yield from self._pass_on(own[number - 1] if number else None, action)
            kind = 0 if action.kind == "F" else 1
            duration = float(costs.seconds[kind * len(self.lanes) + index])
            if number == len(own) - 1:
                reduction = env.process(self._reduce(index, duration))
            yield env.timeout(duration)
            if self.sends == BESIDE and self._reader(action) in self.arrived:
                env.process(self._send(action))
        yield from self._pass_on(own[-1], None)
        yield reduction
        yield env.timeout(float(costs.late[index]))
        yield env.timeout(float(costs.optimizer[index]))

    def _reader(self, action: Action) -> Action:
        return replace(action, stage=action.stage + _STEP[action.kind])

    def _pass_on(self, done: Action | None, following: Action | None) -> Generator[Any, Any, None]:
        """What a lane does between two actions: it sends, and receives."""
        if self.sends == BESIDE:
            if following in self.arrived:
                yield self.arrived[following]
            return
        sent = None if done is None else self._reader(done)
        both = [(a, side) for side, a in enumerate((sent, following)) if a in self.arrived]
        both.sort(key=lambda item: (self.level[item[0]], item[0].kind == "F"))
        if self.sends == AT_ONCE:
            for action, side in both:
                self.there[action][side].succeed()
            yield self.env.all_of([self.arrived[action] for action, _ in both])
            return
        for action, side in both:
            self.there[action][side].succeed()
            yield self.arrived[action]

    def _meeting(self, action: Action) -> Generator[Any, Any, None]:
        yield self.env.all_of(self.there[action])
        cut = min(action.stage, action.stage - _STEP[action.kind])
        yield self.env.timeout(float(self.costs.transfer[cut]))
        self.arrived[action].succeed()

    def _send(self, action: Action) -> Generator[Any, Any, None]:
        target = self._reader(action)
        link = (action.stage, target.stage)
        with self.links.setdefault(link, simpy.Resource(self.env)).request() as turn:
            yield turn
            yield self.env.timeout(float(self.costs.transfer[min(link)]))
        self.arrived[target].succeed()

    def _reduce(self, stage: int, duration: float) -> Generator[Any, Any, None]:
        begin = self.env.now
        for bucket in range(self.costs.bucket_first[stage], self.costs.bucket_first[stage + 1]):
            ready = begin + float(self.costs.bucket_ready[bucket]) * duration
            yield self.env.timeout(max(0.0, ready - self.env.now))
            yield self.env.timeout(float(self.costs.bucket_seconds[bucket]))


_STEP = {"F": 1, "B": -1}


def best_seconds(call: Callable[[], object], repeats: int, loops: int) -> float:
    """Seconds of CPU of one call, the best of `repeats` windows of `loops` calls."""
    windows = []
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(loops):
            call()
        windows.append((time.process_time() - started) / loops)
    return min(windows)


def random_costs(
    rng: np.random.Generator, stages: int, buckets: int = 5, sends: int = BESIDE
) -> Durations:
    """Seconds of stages that each have a lane, with sends, buckets and an optimizer."""
    forward, backward = rng.uniform(1, 2, stages), rng.uniform(2, 4, stages)
    return Durations(
        seconds=np.concatenate([forward, backward, backward, np.zeros(stages)]),
        transfer=rng.uniform(0.0, 1.5, stages - 1),
        sends=np.full(stages - 1, sends),
        optimizer=rng.uniform(0.5, 1.0, stages),
        bucket_first=np.arange(stages + 1) * buckets,
        bucket_seconds=rng.uniform(0.0, 1.0, stages * buckets),
        bucket_ready=np.tile(np.linspace(1 / buckets, 1, buckets), stages),
        late=rng.uniform(0.0, 0.5, stages),
        joint_one=np.zeros(0, np.int64),
        joint_other=np.zeros(0, np.int64),
        joint_seconds=np.zeros(0),
        cores=np.arange(stages),
    )


def simulator_rows(stages: int, micro_batches: int, repeats: int) -> list[tuple[str, str]]:
    """Plans a second: compiled, in plain Python, and with simpy."""
    rng = np.random.default_rng(0)
    lanes = lane_orders("1f1b", tuple(range(stages)), micro_batches)
    order, rows = orders(lanes), []
    for name, sends in (("beside compute", BESIDE), ("at once", AT_ONCE), ("in turn", IN_TURN)):
        costs = [random_costs(rng, stages, sends=sends) for _ in range(_BATCH)]
        check_equal(lanes, order, costs)
        rates = simulator_rates(lanes, order, costs, repeats)
        quickest = max(rates.values())
        shape = f"1F1B, {stages} stages, {micro_batches} micro-batches, sends {name}"
        rows += [
            (f"{what}, {shape}", f"{rate:,.0f} plans/s ({quickest / rate:,.0f} times as slow)")
            for what, rate in rates.items()
        ]
    return rows


def check_equal(lanes: Lanes, order: Orders, costs: list[Durations]) -> None:
    """Raise RuntimeError unless all simulators find the step times of the first and last plan."""
    found = step_times([order] * len(costs), costs)
    for at in (0, -1):
        others = (
            simulate(order, costs[at]).seconds,
            python_step(order, costs[at]),
            SimpyStep(lanes, costs[at]).run(),
        )
        if not np.allclose(others, found[at], rtol=1e-12, atol=0.0):
            raise RuntimeError(f"the simulators do not agree: {found[at]}, {others}")


def simulator_rates(
    lanes: Lanes, order: Orders, costs: list[Durations], repeats: int
) -> dict[str, float]:
    """Plans a second of each simulator."""
    lists, one = [order] * len(costs), costs[0]
    return {
        f"compiled, {len(costs)} plans a call": len(costs)
        / best_seconds(lambda: step_times(lists, costs), repeats, 1),
        "compiled, a plan a call": 1
        / best_seconds(lambda: simulate(order, one).seconds, repeats, 200),
        "plain Python": 1 / best_seconds(lambda: python_step(order, one), repeats, 2),
        "simpy": 1 / best_seconds(lambda: SimpyStep(lanes, one).run(), repeats, 1),
    }


def estimate_rows(repeats: int) -> list[tuple[str, str]]:
    """Milliseconds of an estimate of Llama-3-70B."""
    graph, rows = library.build("llama-3-70b", seq_len=4096), []
    for nodes, pp in ((8, 8), (128, 16)):
        instance = Instance(graph, Cluster.parse(f"{nodes}x8xH100-80"), global_batch=1024)
        plan = uniform_plan(instance, pp=pp, tp=8, micro_batches=64)
        estimator = Estimator(instance)
        estimator.estimate(plan)
        others = iter(_neighbours(plan))
        first = best_seconds(lambda: _first(instance, plan), repeats, 1)  # noqa: B023
        again = best_seconds(lambda: estimator.estimate(next(others)), repeats, 10)  # noqa: B023
        where = f"Llama-3-70B, tp 8, pp {pp}, on {len(instance.cluster.devices):,} H100"
        rows.append((f"first estimate, {where}", f"{first * 1e3:.1f} ms"))
        rows.append((f"estimate of a neighbour, {where}", f"{again * 1e3:.2f} ms"))
    return rows


def _first(instance: Instance, plan: Plan) -> None:
    lane_orders.cache_clear()
    flow.cache_clear()
    Estimator(instance).estimate(plan)


def _neighbours(plan: Plan) -> list[Plan]:
    """Plans that differ in the choice of one group each."""
    found = []
    for number, stage in enumerate(plan.stages):
        for index in range(len(stage.choices)):
            choices = list(stage.choices)
            choices[index] = replace(choices[index], recompute="full")
            changed = replace(stage, choices=tuple(choices))
            found.append(
                replace(plan, stages=(*plan.stages[:number], changed, *plan.stages[number + 1 :]))
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=16, help="pipeline stages (default 16)")
    parser.add_argument("--micro-batches", type=int, default=64, help="micro-batches (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="windows, the best counts (5)")
    args = parser.parse_args()
    table = Table("what", "figure", title=f"simulator on {platform.processor() or 'this CPU'}")
    rows = simulator_rows(args.stages, args.micro_batches, args.repeats)
    for row in (*rows, *estimate_rows(args.repeats)):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
