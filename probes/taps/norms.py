"""Slot gradients of modules whose output is affine in their parameters, element by element: norms.

For y = w * h(x) + b (also (1 + w) * h(x)) the gradient of w is a sum over rows of dy * h(x), whatever h is,
so one run of the module with w = 1 and one with w = 0 give all slots at once. The formula of the most common
norm is known, and checked against the module, since a run costs more than the sums.

Legend: N tagged rows, T tokens, D numbers of a parameter, C cells.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from gradscope.probes.accumulators import SlotAccumulators
from gradscope.probes.rows import RowBatch
from gradscope.probes.taps.by_cell import sum_by_cell
from gradscope.probes.targets import Affine, RootMeanSquare


def read_affine(module: nn.Module) -> Affine | None:
    """Returns how a leaf module depends on its parameters, found by trying; None where it is not affine.

    Parameters must all have the shape of the last axes of the input, and the input must be the only argument
    that the module needs.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    shapes = {parameter.shape for parameter in parameters.values()}
    if len(shapes) != 1 or _num_needed_arguments(module) != 1:
        return None
    first = next(iter(parameters.values()))
    generator = torch.Generator().manual_seed(0)
    x, *values = (
        torch.randn(*lead, *first.shape, generator=generator, dtype=torch.float64).to(first)
        for lead in [(2, 3), *[()] * len(parameters)]
    )
    try:
        zero = _run(module, x, dict.fromkeys(parameters, 0.0))
        units = {name: _run(module, x, dict.fromkeys(parameters, 0.0) | {name: 1.0}) for name in parameters}
        full = _run(module, x, dict(zip(parameters, values, strict=True)))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None  # a module that wants another kind of input is none of ours
    if zero.shape != x.shape:
        return None
    slopes = {name: unit - zero for name, unit in units.items()}
    expected = zero + sum(slopes[name] * value for name, value in zip(parameters, values, strict=True))
    tolerance = 32 * torch.finfo(first.dtype).eps
    if not torch.allclose(full, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        return None
    shifts = frozenset(name for name, slope in slopes.items() if bool((slope == 1).all()))
    return Affine(shifts, vanishes=not bool(zero.any()), formula=_read_root_mean_square(module))


INNER_TYPES = (torch.float32, torch.float64)
"""Types in which norms compute; narrower ones are cast to the first."""


def inverse_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns 1 / sqrt(mean x^2 + eps) over the last axis, which stays."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def root_mean_square(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of `x`, as `RootMeanSquare` has it, and the `inverse_root`."""
    inner = x if x.dtype in INNER_TYPES else x.float()
    factor = inverse_root(inner, eps)
    h = inner * factor
    return weight * (h if h.dtype == x.dtype else h.to(x.dtype)), factor


def _read_root_mean_square(module: nn.Module) -> RootMeanSquare | None:
    """Returns the formula of a norm with one vector of weights, found by trying."""
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or len(module._parameters) != 1 or weight.dim() != 1 or not isinstance(eps, float):
        return None
    # torch's own warns where types differ, and is used with one.
    mixed = () if isinstance(module, nn.RMSNorm) else (*INNER_TYPES, torch.bfloat16, torch.float16)
    kept = [dtype for dtype in {weight.dtype, *mixed} if _is_formula(module, eps, dtype)]
    return RootMeanSquare(eps, frozenset(kept)) if kept else None


def _is_formula(module: nn.Module, eps: float, dtype: torch.dtype) -> bool:
    parameter = module.get_parameter("weight")
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(5, *parameter.shape, generator=generator)
    # Inputs of several sizes, down to where eps counts.
    x = draw[:4] * torch.tensor([3.0, 1.0, 0.1, eps**0.5]).unsqueeze(1)
    x, weight = x.to(parameter.device, dtype), draw[4].to(parameter.device, parameter.dtype)
    try:
        found = _run(module, x, {"weight": weight})
    except RuntimeError:
        return False  # of other types than it takes
    expected, _ = root_mean_square(x, weight, eps)
    if found.dtype != expected.dtype:
        return False
    tolerance = 8 * torch.finfo(dtype).eps if dtype in INNER_TYPES else 0.0
    return torch.allclose(found, expected, rtol=tolerance, atol=0.0)


def add_affine(
    module: nn.Module,
    affine: Affine,
    wanted: Mapping[str, nn.Parameter],
    batch: RowBatch,
    into: SlotAccumulators,
    x: torch.Tensor,
    dy: torch.Tensor,
) -> None:
    """Adds each cell's gradient of a norm's parameters to the sums.

    Args:
        module: The norm.
        affine: What `read_affine` says of it.
        wanted: The parameters that take part, by their name in the module.
        batch: The rows that went through it.
        into: The sums of its policy.
        x: Its input, `[N, ..., *D]`.
        dy: Gradient of its output, of the same shape.
    """
    formula = affine.formula if x.dtype in INNER_TYPES else None
    for name, parameter in wanted.items():
        sums, factor = into.stacked(parameter), None
        products = dy.to(sums.dtype)
        if formula is not None and x.dtype in formula.dtypes and sums.dtype == x.dtype:
            products, factor = products * x, inverse_root(x, formula.eps).flatten()
        elif name not in affine.shifts:
            products = products * _slope(module, affine, x, name).to(sums.dtype)
        parts = sum_by_cell(products.reshape(-1, parameter.numel()), factor, batch, into.cells)
        sums.add_(parts.view(sums.shape))


def _slope(module: nn.Module, affine: Affine, x: torch.Tensor, name: str) -> torch.Tensor:
    if isinstance(module, nn.LayerNorm):
        x = x.to(module.get_parameter(name).dtype)  # autocast, which lets types differ, is not on now
    zeros = {other: 0.0 for other, p in module._parameters.items() if p is not None}
    ones = _run(module, x, zeros | {name: 1.0})
    return ones if affine.vanishes else ones - _run(module, x, zeros)


def _run(module: nn.Module, x: torch.Tensor, values: Mapping[str, float | torch.Tensor]) -> torch.Tensor:
    """Runs `forward` itself, not the call: hooks, ours among them, must not run again."""
    with torch.no_grad(), _filled(module, values, x):
        output: torch.Tensor = module.forward(x)
    return output


@contextmanager
def _filled(module: nn.Module, values: Mapping[str, float | torch.Tensor], x: torch.Tensor) -> Iterator[None]:
    """Gives a module other parameter values for the duration of a block."""
    before = dict(module._parameters)
    try:
        for name, value in values.items():
            parameter = before[name]
            assert parameter is not None
            tensor = (
                torch.full(parameter.shape, value, dtype=parameter.dtype, device=x.device)
                if isinstance(value, float)
                else value
            )
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        module._parameters.update(before)


def _num_needed_arguments(module: nn.Module) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(module.forward).parameters.values()
    return sum(
        argument.kind in kinds and argument.default is inspect.Parameter.empty for argument in signature
    )
