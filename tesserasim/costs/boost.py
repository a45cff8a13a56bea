"""A small learner for what the mechanisms leave over: boosted oblivious trees, exact in integers.

An oblivious tree asks the same question (feature f <= threshold?) at every node of a level, so a tree of depth d
is d comparisons and one look-up among 2^d leaves: whole tables are predicted in a few array operations.

*Bit for bit.* Targets are whole multiples of `UNIT` (in log time), so every sum of a fit is a sum of integers below
2^53 and comes out the same in any order; what remains are single IEEE operations and one argmax. Two machines that
bin the same values therefore fit the same trees, whatever their vector units or numbers of threads.

*Held-out groups.* A tree is fitted on a random half of the groups (shapes that share their widths), not of the rows:
what it learns must carry over to groups that it has not seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tesserasim.costs.times import FloatArray

IntArray = NDArray[np.int64]
BinArray = NDArray[np.uint8]

#: Resolution of targets and leaves, in log time: 6e-5, far below any error of interest.
UNIT = 2.0**-14
BINS = 64
#: Borders are multiples of this, so that they are exact in single precision too.
BORDER = 2.0**-12
PIECE = 256
_COUNT = float(1 << 34)  # a row counts 2^34 in a sum that also holds its residual: two histograms in one


@dataclass(frozen=True)
class BoostParams:
    """How to fit. `clip`: residuals count at most this much (log), so that outliers do not lead."""

    trees: int = 300
    depth: int = 6
    rate: float = 0.1
    shrink: float = 20.0  # rows of residual 0 added to every leaf
    clip: float = 0.3
    share: float = 0.5  # of the groups, per tree
    features: float = 0.6  # of the features, per tree
    seed: int = 0


@dataclass(frozen=True)
class Forest:
    """Fitted trees. `edges[f]` are the ascending bin borders of feature f; a value equal to a border lies below it."""

    edges: tuple[FloatArray, ...]  # per feature
    base: int  # in UNITs
    feature: BinArray  # [tree, level]
    threshold: BinArray  # [tree, level] a bin: "above" is bin > threshold
    leaves: NDArray[np.int16]  # [tree, 2^depth] in UNITs

    def bins(self, x: FloatArray) -> BinArray:
        """[feature, row] bins of features x [row, feature]."""
        found = np.empty((len(self.edges), len(x)), dtype=np.uint8)
        for row, edges, column in zip(found, self.edges, x.T, strict=True):
            row[:] = edges.searchsorted(column)
        return found

    def predict(self, x: FloatArray) -> FloatArray:
        """[row] log factor for features x [row, feature]."""
        return self.predict_bins(self.bins(x))

    def predict_bins(self, bins: BinArray) -> FloatArray:
        """[row] log factor for bins [feature, row]: all trees at once, rows in pieces that stay in the cache."""
        trees, depth = self.feature.shape
        total = np.full(bins.shape[1], self.base, dtype=np.int64)
        first = (np.arange(trees, dtype=np.intp) << depth)[:, None]
        flat = self.leaves.ravel()
        for start in range(0, bins.shape[1] if trees else 0, PIECE):
            piece = bins[:, start : start + PIECE]
            leaf = np.zeros((trees, piece.shape[1]), dtype=np.uint8)
            for level in range(depth):
                leaf <<= 1
                above = piece.take(self.feature[:, level], axis=0) > self.threshold[:, level, None]
                leaf |= above.view(np.uint8)
            total[start : start + PIECE] += flat.take(leaf + first).sum(axis=0, dtype=np.int64)
        found: FloatArray = total.astype(np.float64) * UNIT
        return found


def borders(x: FloatArray, bins: int = BINS) -> tuple[FloatArray, ...]:
    """Per feature at most bins - 1 borders halfway between neighbouring values, at equal shares of the distinct ones.

    Values are rounded first: whatever the last bits of a logarithm, the borders are the same.
    """
    found = []
    for column in x.T:
        values = np.unique(np.rint(column / BORDER))
        cuts = (values[1:] + values[:-1]) / 2.0
        if len(cuts) > bins - 1:
            cuts = cuts[(np.arange(bins - 1) * len(cuts)) // (bins - 1)]
        found.append(np.unique(np.rint(cuts)) * BORDER + BORDER / 4)  # no rounded value sits on a border
    return tuple(found)


def fit_forest(x: FloatArray, y: FloatArray, group: IntArray, params: BoostParams) -> Forest:
    """Trees for features x [row, feature] and log factors y [row]; `group` [row] numbers the groups from 0."""
    edges = borders(x)
    empty = np.zeros((0, params.depth), dtype=np.uint8)
    shell = Forest(edges, 0, empty, empty, np.zeros((0, 1 << params.depth), dtype=np.int16))
    bins = shell.bins(x)
    residual = np.rint(y / UNIT).astype(np.int64)
    base = int(np.sort(residual)[len(residual) // 2]) if len(residual) else 0
    residual -= base
    clip, draw = round(params.clip / UNIT), random.Random(params.seed)
    n_groups = int(group.max()) + 1 if len(group) else 0
    trees = []
    usable = [f for f in range(len(edges)) if len(edges[f])]
    for _ in range(params.trees if usable and n_groups else 0):
        picked = np.zeros(n_groups, dtype=bool)
        picked[draw.sample(range(n_groups), max(1, round(params.share * n_groups)))] = True
        features = sorted(draw.sample(usable, max(1, round(params.features * len(usable)))))
        rows = np.flatnonzero(picked[group])
        tree = _grow(bins[:, rows], np.clip(residual[rows], -clip, clip), features, params)
        trees.append(tree)
        residual -= _step(bins, *tree)
    if not trees:
        return Forest(edges, base, empty, empty, shell.leaves)
    feature, threshold, leaves = (np.array(part) for part in zip(*trees, strict=True))
    return Forest(edges, base, feature.astype(np.uint8), threshold.astype(np.uint8), leaves.astype(np.int16))


def _step(bins: BinArray, features: list[int], thresholds: list[int], leaves: IntArray) -> IntArray:
    leaf = np.zeros(bins.shape[1], dtype=np.uint8)
    for f, threshold in zip(features, thresholds, strict=True):
        leaf <<= 1
        leaf |= bins[f] > threshold
    step: IntArray = leaves[leaf]
    return step


def _grow(
    bins: BinArray, residual: IntArray, features: list[int], params: BoostParams
) -> tuple[list[int], list[int], IntArray]:
    """One tree: level by level the (feature, threshold) that explains most of the residual's square."""
    weight = residual.astype(np.float64) + _COUNT
    leaf = np.zeros(bins.shape[1], dtype=np.int64)
    chosen, thresholds = [], []
    for level in range(params.depth):
        best, best_feature, best_threshold = -1.0, features[0], 0
        base = leaf * BINS
        for f in features:
            sums = _sums(base + bins[f], weight, BINS << level)
            gains = _gains(sums.reshape(-1, BINS), params.shrink)
            at = int(np.argmax(gains))
            if gains[at] > best:
                best, best_feature, best_threshold = float(gains[at]), f, at
        chosen.append(best_feature)
        thresholds.append(best_threshold)
        leaf = leaf * 2 + (bins[best_feature] > best_threshold)
    count, total = _unpack(_sums(leaf, weight, 1 << params.depth))
    leaves = np.rint(params.rate * total / (count + params.shrink)).astype(np.int64)
    return chosen, thresholds, leaves


def _sums(index: IntArray, weight: FloatArray, size: int) -> FloatArray:
    found: FloatArray = np.bincount(index, weights=weight, minlength=size).astype(np.float64)
    return found


def _unpack(sums: FloatArray) -> tuple[FloatArray, FloatArray]:
    count = np.floor(sums / _COUNT + 0.5)
    return count, sums - count * _COUNT


def _gains(sums: FloatArray, shrink: float) -> FloatArray:
    """[bin] what a split after each bin explains, summed over the leaves of a level; sums [leaf, bin] are packed."""
    below = np.cumsum(sums, axis=1)
    count, total = _unpack(below)
    rest_count, rest = count[:, -1:] - count, total[:, -1:] - total
    gain = total * total / (count + shrink) + rest * rest / (rest_count + shrink)
    found: FloatArray = np.add.accumulate(gain, axis=0)[-1]  # in order: that of a reduction would be numpy's choice
    found[-1] = -1.0  # nothing above the last bin
    return found
