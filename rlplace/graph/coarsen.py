"""From ops to groups: the parts of a model, as many as are wanted.

Groups are intervals of the export's topological order of body nodes, so each is convex by
construction: no path leaves an interval and comes back. The rule knows no model by name, only
module paths, what each op is, what it costs and which tensors are alive at each position:

1. *Anchors* are the ops that hold the work: matmuls, convolutions, attention and table lookups.
2. Between two neighbouring anchors the best position is the one where the fewest tensors are
   alive, then the one where a repeated module begins or ends, then the shallowest module boundary,
   then the fewest bytes, then the earliest: right after a residual add, before the norm that
   follows it. `rlplace.graph.groups.alive` says which tensors count.
3. It is a cut if a single tensor is alive there (between two lookups it is not).
4. A region between two cuts that runs several branches side by side is cut between them
   (`rlplace.graph.groups.branches`); the factors of one thing, such as q, k and v, stay together.
5. A region that still has many anchors, or is far dearer than the others, is cut where the fewest
   tensors are alive, even if these are several (`rlplace.graph.groups.parts`).
6. Where there are too many groups, those inside repeated elements are joined first, then the
   cheapest neighbours (`rlplace.graph.groups.balance`).
"""

from __future__ import annotations

from rlplace.errors import InputError
from rlplace.graph.groups.balance import grown, limit, thin
from rlplace.graph.groups.parts import Parts
from rlplace.graph.program import Program

#: Granularity -> most groups of a model.
MAX_GROUPS = {"fine": 200, "coarse": 100}
#: Groups are not joined to fewer than this where neighbours can be joined instead.
MIN_GROUPS = 20


def check_granularity(granularity: str | int) -> None:
    """Refuse what is neither a granularity nor a number of groups.

    Raises:
        InputError: With the field ``granularity``.
    """
    if isinstance(granularity, str):
        if granularity not in MAX_GROUPS:
            rule = f"must be one of {', '.join(MAX_GROUPS)}, or a number of groups"
            raise InputError("granularity", granularity, rule, "fine")
    elif isinstance(granularity, bool) or not isinstance(granularity, int):
        raise InputError("granularity", granularity, "must be a whole number of groups", "fine")
    elif granularity < 1:
        raise InputError("granularity", granularity, "must be at least 1 group", 1)


def coarsen(program: Program, granularity: str | int = "fine") -> list[tuple[str, ...]]:
    """Names of the body nodes of each group, in topological order.

    Args:
        program: The exported program.
        granularity: ``fine`` (parts of layers, at most 200 groups), ``coarse`` (whole elements of
            repeated modules, at most 100), or the number of groups that is wanted: the result is
            as near to it as the model allows, from 1 to the number of anchors.

    Raises:
        InputError: If the granularity is none of these.
    """
    check_granularity(granularity)
    body = program.body()
    if not body:
        return []
    parts = Parts(program, MAX_GROUPS["fine"])
    cuts, costs = parts.cuts, parts.costs
    outer = [cut for cut in cuts if not cut.inside]
    if granularity == "fine":
        cuts = limit(cuts, costs, MAX_GROUPS["fine"], MIN_GROUPS)
    elif granularity == "coarse":
        cuts = thin(outer or cuts, costs, MAX_GROUPS["coarse"])
    else:
        wanted = int(granularity)
        if len(cuts) >= wanted:
            cuts = thin(outer or cuts, costs, wanted)
        for spare in (parts.cuts, parts.spare(tied=False), parts.spare(tied=True)):
            cuts = grown(cuts, spare, costs, lambda spans: len(spans) < wanted)
    return [tuple(node.name for node in body[start:stop]) for start, stop in costs.spans(cuts)]
