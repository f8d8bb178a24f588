"""Gradient-boosted trees as plain arrays: out of LightGBM, into a file, and back after a check.

LightGBM reads its own text format without checking that a child exists or that a tree has no cycle: a hostile file
could read foreign memory or never end. So a file holds arrays, which are checked to be trees over the known features,
and the text that LightGBM gets is always written here. Only numerical splits occur (no categories, no linear leaves).

Source: ours; the format is LightGBM's model text, version v4 (src/io/gbdt_model_text.cpp, src/io/tree.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from ranker.errors import RankerFileError

if TYPE_CHECKING:
    import lightgbm

MAX_TREES = 600
"""Scoring time grows with them."""
MAX_LEAVES = 4_096
DECISION_TYPES = frozenset({0, 2, 4, 6, 8, 10})
"""Bit 0 would be a categorical split; bit 1 the default direction, bits 2-3 how a missing value is treated."""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """One tree of L leaves; its L-1 inner nodes come in any order, the root first.

    features, thresholds, decisions: [L-1].  left, right: [L-1] children, an inner node >= 0 or leaf ~i.  leaves: [L].
    """

    features: list[int]
    thresholds: list[float]
    decisions: list[int]
    left: list[int]
    right: list[int]
    leaves: list[float]


def read_booster(booster: lightgbm.Booster) -> tuple[Tree, ...]:
    """The trees of a booster that was trained here."""
    blocks = booster.model_to_string().split("\nTree=")[1:]
    return tuple(_read_tree(dict(_pairs(block))) for block in blocks)


def _pairs(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines()[1:]:
        key, equals, value = line.partition("=")
        if not equals:
            return  # the end of this tree
        yield key, value


def _read_tree(values: dict[str, str]) -> Tree:
    def numbers(key: str) -> list[str]:
        return values.get(key, "").split()

    return Tree(
        features=[int(value) for value in numbers("split_feature")],
        thresholds=[float(value) for value in numbers("threshold")],
        decisions=[int(value) for value in numbers("decision_type")],
        left=[int(value) for value in numbers("left_child")],
        right=[int(value) for value in numbers("right_child")],
        leaves=[float(value) for value in numbers("leaf_value")],
    )


def check_trees(trees: Sequence[Tree], num_features: int) -> None:
    """Raises RankerFileError unless every tree is one, over these features."""
    if not 1 <= len(trees) <= MAX_TREES:
        raise RankerFileError(f"a stored ranker has {len(trees)} trees, not 1 to {MAX_TREES}")
    for number, tree in enumerate(trees):
        problem = _problem(tree, num_features)
        if problem:
            raise RankerFileError(f"tree {number} of the stored ranker: {problem}")


def _problem(tree: Tree, num_features: int) -> str | None:
    inner, leaves = len(tree.features), len(tree.leaves)
    if not 1 <= leaves <= MAX_LEAVES or inner != leaves - 1:
        return f"{leaves} leaves and {inner} inner nodes"
    if any(len(part) != inner for part in (tree.thresholds, tree.decisions, tree.left, tree.right)):
        return "its arrays differ in length"
    if not all(0 <= feature < num_features for feature in tree.features):
        return f"it asks for a feature that is not among {num_features}"
    if not DECISION_TYPES.issuperset(tree.decisions):
        return "a kind of split that is not used here"
    if not all(map(math.isfinite, tree.leaves)) or any(map(math.isnan, tree.thresholds)):
        return "a value that is not finite"
    return None if _is_tree(tree) else "its nodes do not form a tree"


def _is_tree(tree: Tree) -> bool:
    """Every node but the root is a child once, and all are reached from the root."""
    inner, leaves = len(tree.features), len(tree.leaves)
    if inner == 0:
        return True  # a single leaf, what LightGBM makes of equal targets
    once = sorted([*tree.left, *tree.right]) == [*range(-leaves, 0), *range(1, inner)]
    return once and _num_reached(tree) == inner


def _num_reached(tree: Tree) -> int:
    """Inner nodes reached from the root; ends because no node is the child of two."""
    reached, open_nodes = 0, [0]
    while open_nodes:
        node = open_nodes.pop()
        reached += 1
        open_nodes.extend(child for child in (tree.left[node], tree.right[node]) if child >= 0)
    return reached


def write_booster(trees: Sequence[Tree], num_features: int) -> lightgbm.Booster:
    """A booster that predicts the sum of the trees. Raises RankerFileError as ``check_trees``."""
    check_trees(trees, num_features)
    header = [
        "tree",
        "version=v4",
        "num_class=1",
        "num_tree_per_iteration=1",
        "label_index=0",
        f"max_feature_idx={num_features - 1}",
        "objective=regression",  # leaves are summed as they are: a link function is the caller's
        "feature_names=" + " ".join(f"f{index}" for index in range(num_features)),
        "feature_infos=" + " ".join(["none"] * num_features),
        "",
    ]
    blocks = ["\n".join(_tree_lines(number, tree)) for number, tree in enumerate(trees)]
    text = "\n".join([*header, *blocks, "end of trees", ""])
    import lightgbm  # takes half a second, which a run without a text model saves

    return lightgbm.Booster(model_str=text)


def _tree_lines(number: int, tree: Tree) -> list[str]:
    def numbers(key: str, values: Sequence[float]) -> str:
        return f"{key}=" + " ".join(map(repr, values))

    lines = [f"Tree={number}", f"num_leaves={len(tree.leaves)}", "num_cat=0"]
    if tree.features:
        lines += [
            numbers("split_feature", tree.features),
            numbers("threshold", tree.thresholds),
            numbers("decision_type", tree.decisions),
            numbers("left_child", tree.left),
            numbers("right_child", tree.right),
        ]
    return [*lines, numbers("leaf_value", tree.leaves), "is_linear=0", "shrinkage=1", "", ""]


def raw_scores(booster: lightgbm.Booster, rows: object) -> NDArray[np.float64]:
    """[N] sum of the leaves, on one thread: the caller decides how many cores scoring may take."""
    return np.asarray(booster.predict(rows, raw_score=True, num_threads=1), dtype=np.float64)  # pyright: ignore[reportArgumentType]
