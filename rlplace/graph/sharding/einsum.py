"""The equation of an einsum as labels of dims, with the dots written out."""

from __future__ import annotations

from torch import fx

from rlplace.graph.sharding.labels import Labels, Signature, names
from rlplace.graph.sharding.nodes import shape, tensor_args


def einsum_terms(equation: str, ranks: list[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Labels of each operand and of the result.

    Args:
        equation: As `torch.einsum` takes it; without an arrow the result has the dims of the dots,
            then the labels that occur once, in the order of the alphabet.
        ranks: Number of dims of each operand.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    most = max((n for n, term in zip(spare, terms, strict=True) if "..." in term), default=0)
    dots = names("dots", most)
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        right = "..." * ("..." in left) + "".join(c for c in letters if left.count(c) == 1)

    def labels(term: str, count: int) -> tuple[str, ...]:
        before, found, after = term.partition("...")
        return (*before, *(dots[most - count :] if found else ()), *after)

    operands = [labels(term, count) for term, count in zip(terms, spare, strict=True)]
    return operands, labels(right, most)


def einsum_signature(node: fx.Node) -> Signature | None:
    """Labels straight from the equation.

    A sharding starts, as in a matmul, on what is summed over and on what the last operand adds.
    """
    args = tensor_args(node)
    shapes = [shape(arg) for arg in args]
    operands, output = einsum_terms(str(node.args[0]), [len(own) for own in shapes])
    if any(len(set(labels)) < len(labels) for labels in operands):
        return None  # a diagonal
    sizes = [
        dict(zip(labels, own, strict=True)) for labels, own in zip(operands, shapes, strict=True)
    ]
    full = {label: max(own.get(label, 0) for own in sizes) for own in sizes for label in own}
    inputs: list[Labels] = [
        tuple(label if own[label] == full[label] else None for label in labels)
        for labels, own in zip(operands, sizes, strict=True)
    ]
    contracted = frozenset(full) - set(output)
    earlier = {label for labels in operands[:-1] for label in labels}
    last = [label for label in operands[-1] if label in output and label not in earlier]
    origins = (*last, *(label for label in full if label in contracted))
    return Signature(tuple(inputs), output, contracted, origins if len(args) > 1 else ())
