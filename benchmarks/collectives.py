"""How well the model of collectives meets published times, and the fit of its constants.

Reads ../shared/data and says so where it is absent. Run from the root of the repository:
``python -m benchmarks.collectives`` prints, for each table and collective, the number of
measurements, median and 90th percentile of |predicted / measured - 1| and the median of its sign,
apart for those that constants were fitted to and the others; ``--fit`` fits the constants anew.

Fitted are: H200 (ml-engineering; rings and, from 5 GPUs up, NVLS) and the ring of eight B200, eight
MI300X, every second size up to 16 MiB of the four-node example of nccl-tests, the playbook's
all-gathers and all-reduces on 2, 8 and 32 nodes, RTX 5090 on 8 GPUs, DGX A100 on 2 nodes, V100 on 4
nodes of Omni-Path, Galvatron's figures of the eight GPUs of one node (2025 by size, else one of
A800 and one of TITAN RTX), every fifth of Aceso's all-reduces of 8 and three of its messages inside
a node, and Sailor's messages of one RTX 2080 and one GH200. All other rows are held out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

import rlplace.cost.collectives as model
from benchmarks.collective_tables import DATA, Case, cases, parsed
from rlplace.cluster.calibrated import link_family
from rlplace.cluster.catalogue import COLLECTIVE_LAUNCH, ENTRIES
from rlplace.cluster.links import LINK_KINDS, NVLINK_EFFICIENCY
from rlplace.cluster.types import Cluster, Link

#: The constants that are fitted: family of link and field.
FITTED = (
    ("nvlink", "latency"), ("pcie", "efficiency"),
    ("ib", "latency"), ("ib", "efficiency"), ("eth", "latency"), ("eth", "efficiency"),
    ("efa", "efficiency"), ("efa", "relay"), ("opa", "efficiency"),
)  # fmt: skip

Constants = Mapping[tuple[str, str], float]


def shipped() -> dict[tuple[str, str], float]:
    """The constants of the catalogue."""
    links = {(family, field): float(getattr(LINK_KINDS[family], field)) for family, field in FITTED}
    generations = {
        (f"nvlink {number}", "efficiency"): share for number, share in NVLINK_EFFICIENCY.items()
    }
    return (
        links
        | generations
        | {
            ("device", "collective_launch"): COLLECTIVE_LAUNCH,
            ("switch", "share"): model.SWITCH_SHARE,
            ("exchange", "share"): model.EXCHANGE_SHARE,
        }
    )


def with_constants(cluster: Cluster, case: Case, constants: Constants) -> Cluster:
    """The cluster of a case with constants replaced and in-network reduction as it was."""
    generation = ENTRIES[cluster.kinds[0].name].generation

    def own(link: Link) -> Link:
        family = link_family(link.name)
        fields = {field: value for (name, field), value in constants.items() if name == family}
        if family == "nvlink":
            fields["efficiency"] = constants[f"nvlink {generation}", "efficiency"]
        elif "efficiency" in fields:  # the family's, of which a kind may reach a part
            fields["efficiency"] *= link.efficiency / LINK_KINDS[family].efficiency
        link = replace(link, **fields, reduces=link.reduces and case.reduces)  # type: ignore[arg-type]  # all are floats
        return replace(link, nics=case.nics) if case.nics and family not in {"nvlink"} else link

    nodes = tuple(
        replace(node, intra=own(node.intra), nic=None if node.nic is None else own(node.nic))
        for node in cluster.nodes
    )
    launch = constants["device", "collective_launch"]
    kinds = tuple(replace(kind, collective_launch=launch) for kind in cluster.kinds)
    return replace(cluster, nodes=nodes, kinds=kinds)


def predict(found: Sequence[Case], constants: Constants) -> list[float]:
    """Seconds of each case."""
    model.SWITCH_SHARE = constants["switch", "share"]
    model.EXCHANGE_SHARE = constants["exchange", "share"]
    clusters: dict[tuple[str, bool, int], Cluster] = {}
    rings: dict[tuple[object, ...], model.Ring] = {}
    times = []
    for case in found:
        key = (case.cluster, case.reduces, case.nics)
        if key not in clusters:
            clusters[key] = with_constants(parsed(case.cluster), case, constants)
        cluster = clusters[key]
        if case.kind == "p2p":
            times.append(model.point_to_point(cluster, case.members, case.busy, case.size))
            continue
        whole = (*key, case.members, case.busy)
        if whole not in rings:
            rings[whole] = model.ring(cluster, case.members, case.busy)
        times.append(model.seconds(case.kind, case.size, rings[whole]))
    return times


def fit(found: Sequence[Case]) -> dict[tuple[str, str], float]:
    """Constants by least squares of the logarithm of the time, with a soft L1 loss.

    Rows of one table together weigh as much as those of another.
    """
    rows = [case for case in found if case.fitted]
    names, start = list(shipped()), np.array(list(shipped().values()))
    measured = np.array([case.seconds for case in rows])
    counts: dict[str, int] = defaultdict(int)
    for case in rows:
        counts[case.table] += 1
    weights = np.array([counts[case.table] ** -0.5 for case in rows])

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logs), strict=True))
        off: np.ndarray = weights * np.log(np.array(predict(rows, constants)) / measured) / 0.1
        return off

    solution = least_squares(residuals, np.log(start), loss="soft_l1", x_scale=0.1)
    return {name: float(value) for name, value in zip(names, np.exp(solution.x), strict=True)}


def errors(found: Sequence[Case], constants: Constants) -> dict[tuple[str, str, bool], np.ndarray]:
    """Relative errors by table, collective, and whether the row was fitted."""
    groups: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for case, time in zip(found, predict(found, constants), strict=True):
        groups[case.table, case.kind, case.fitted].append(time / case.seconds - 1)
    return {key: np.array(groups[key]) for key in sorted(groups)}


def show(found: Sequence[Case], constants: Constants) -> Table:
    """The errors as a table."""
    table = Table("table", "collective", "rows", "n", "median %", "p90 %", "bias %")
    for (name, kind, fitted), error in errors(found, constants).items():
        size = np.abs(error)
        figures = (np.median(size), np.quantile(size, 0.9), np.median(error))
        said = [f"{100 * figure:.1f}" for figure in figures]
        table.add_row(name, kind, "fitted" if fitted else "held out", str(len(error)), *said)
    return table


def main() -> None:
    """Print the constants and the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew")
    arguments = parser.parse_args()
    console = Console(width=110)
    if not DATA.exists():
        console.print("../shared/data is absent: nothing to compare with")
        return
    found = cases()
    constants = fit(found) if arguments.fit else shipped()
    for (family, field), value in constants.items():
        console.print(f"{family} {field}: {value:.4g}")
    console.print(show(found, constants))


if __name__ == "__main__":
    main()
