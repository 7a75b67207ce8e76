"""Small results by hand."""

from benchmarks.fidelity_tables.types import (
    ClusterSpec,
    GraphSpec,
    Measured,
    Result,
    Row,
    Workload,
)


def result(
    measured: float | None = 1.0,
    predicted: float = 1.0,
    *,
    line: int = 0,
    group: str = "g",
    batch: int = 1,
    memory: tuple[float | None, float] = (None, 0.0),
    ran: bool | None = True,
    feasible: bool = True,
    fit: bool = False,
    problem: str = "",
) -> Result:
    """A result; `memory` is (measured, predicted)."""
    graph, cluster = GraphSpec("gpt", ()), ClusterSpec("A100-80", 8)
    workload = Workload(graph, cluster, batch, "bf16-mixed", "torch")
    said = Measured(measured, memory[0], "allocated", ran=ran)
    row = Row("table", line, {"tp": "2"}, workload, {"tp": 2}, said, (group,), fit)
    return Result(row, predicted, memory[1], feasible, problem, {"forward": 0.5})
