"""Quantizing a matrix for the activations it will meet, instead of number by number.

What counts is the error of `x @ w.T` for the inputs x of this matrix, and their second moments say how errors of
different columns add up. GPTQ (arXiv:2210.17323) quantizes one column after the other and lets the columns still to
come make up for the error so far. Where a group of columns begins, its scale and minimum are searched for the smallest
error weighted by how large each column's input is, in the manner of llama.cpp's k-quants.

Shapes: N rows, K columns, G groups of g columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Added to the diagonal, as a part of its mean: what a small calibration text does not show counts a little too.
_DAMPING = 0.02
_LAZY_COLUMNS = 128  # later columns hear of the errors of this many at once, as one matrix product
_SEARCH_STEPS = 12
_SMALLEST_RANGE = 0.65


@dataclass(frozen=True)
class Grid:
    """The numbers that a format has for a group of columns: `scale * q + minimum` for q from `low` to `high`.

    `find` takes a group's weights `[N, g]` and the importance `[g]` of its columns and gives scale and minimum, `[N]`.
    """

    low: int
    high: int
    find: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Quantized:
    """`q` `[N, K]`, `scale` and `minimum` `[N, G]`, all as float32."""

    q: Tensor
    scale: Tensor
    minimum: Tensor

    def dequantize(self) -> Tensor:
        groups = self.q.unflatten(-1, (self.scale.shape[-1], -1))
        return (groups * self.scale[..., None] + self.minimum[..., None]).flatten(-2)


def gptq(weight: Tensor, moments: Tensor, grid: Grid, group_size: int) -> Quantized:
    """
    Args:
        weight: `[N, K]` float32, K a multiple of `group_size`.
        moments: `[K, K]`, the sum or mean of `x x.T` over inputs x; if it is zero, all columns count alike.
    """
    rows, columns = weight.shape
    factor, importance = _inverse_factor(moments)
    left_KN = weight.T.contiguous()  # what is still to be represented; a column of the matrix is a row here
    q_KN = torch.empty_like(left_KN)
    scales, minima = [], []
    for start in range(0, columns, _LAZY_COLUMNS):
        end = min(columns, start + _LAZY_COLUMNS)
        errors = torch.empty(end - start, rows)
        for k in range(start, end):
            if k % group_size == 0:
                group = slice(k, k + group_size)
                scale, minimum = grid.find(left_KN[group].T.contiguous(), importance[group])
                scales.append(scale)
                minima.append(minimum)
            q_KN[k] = _nearest(left_KN[k], scale, minimum, grid.low, grid.high)
            error = (left_KN[k] - (q_KN[k] * scale + minimum)) / factor[k, k]
            left_KN[k + 1 : end].addr_(factor[k, k + 1 : end], error, alpha=-1)
            errors[k - start] = error
        left_KN[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return Quantized(q_KN.T.contiguous(), torch.stack(scales, -1), torch.stack(minima, -1))


def _inverse_factor(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of the inverse of the damped moments, and their diagonal."""
    damped = moments.double()
    mean = damped.diagonal().mean()
    damped += torch.eye(len(damped), dtype=torch.float64) * (mean * _DAMPING if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float(), damped.diagonal().float()


def _find_int4(weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum `[...]` of groups `[..., g]`, both numbers of float16.

    Each candidate is a narrower range than the one from the smallest to the largest weight; what it rounds to is fitted
    by weighted least squares, and the best of all is taken.
    """
    low, high = weight.amin(-1), weight.amax(-1)
    total, first = importance.sum(-1), (importance * weight).sum(-1)
    scale, minimum = _halved((high - low) / 15), _halved(low)
    best = _weighted_error(weight, importance, scale, minimum)
    for step in range(_SEARCH_STEPS):
        width = (high - low) * (1 - (1 - _SMALLEST_RANGE) * step / _SEARCH_STEPS)
        q = _nearest(weight, (width / 15)[..., None], ((high + low - width) / 2)[..., None], 0, 15)
        weighted = importance * q
        sum_q, sum_qq, sum_qw = weighted.sum(-1), (weighted * q).sum(-1), (weighted * weight).sum(-1)
        spread = total * sum_qq - sum_q**2
        fits = spread > 1e-6 * total * sum_qq
        spread = spread.where(fits, spread.new_ones(()))
        scale_ = _halved((total * sum_qw - sum_q * first) / spread)
        minimum_ = _halved((sum_qq * first - sum_q * sum_qw) / spread)
        error = _weighted_error(weight, importance, scale_, minimum_)
        better = fits & (error < best)
        best, scale, minimum = (
            new.where(better, old) for new, old in ((error, best), (scale_, scale), (minimum_, minimum))
        )
    return scale, minimum


def _weighted_error(weight: Tensor, importance: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    scale, minimum = scale[..., None], minimum[..., None]
    return (importance * (_nearest(weight, scale, minimum, 0, 15) * scale + minimum - weight) ** 2).sum(-1)


def _halved(x: Tensor) -> Tensor:
    return x.half().float()


def _nearest(weight: Tensor, scale: Tensor, minimum: Tensor, low: int, high: int) -> Tensor:
    """The q that comes closest; 0 where the scale is 0. Shapes are broadcast."""
    steps = torch.where(scale == 0, 0.0, 1 / scale)
    return ((weight - minimum) * steps).round_().clamp_(low, high)


# 16 numbers from a float16 minimum upwards in float16 steps; 255 numbers around zero up to the row's largest magnitude.
INT4 = Grid(0, 15, _find_int4)
INT8 = Grid(-127, 127, lambda weight, _: (weight.abs().amax(-1) / 127, torch.zeros(len(weight))))
