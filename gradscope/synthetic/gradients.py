"""Gram series of one shared policy with a known change of one role, and harmless ones that look like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CHANGES = ("capture", "amplification")
"""What the detectors are to find."""
HARMLESS = (
    "healthy", "structural", "growth", "common_growth", "dominance", "drift", "temporary", "spikes",
    "coherence", "size", "noisy", "permuted",
)  # fmt: skip
"""What they are not to take for it: dominance without drift, drift without it, coherence or size
alone, stationary noise as large as small runs have it, and a take-over whose steps stand in random order."""


@dataclass(frozen=True)
class GradientSeries:
    """What a run's gradients and replies looked like.

    Attributes:
        gram: Products of the slots' gradients, `[T, K, K]`.
        tokens: Mean reply tokens of each slot, `[T, K]`.
        violation: Fraction of its replies outside their format, `[T, K]`.
        role: The role whose gradient changes; None where none does.
        onset: First row of the change; None where there is none.
    """

    gram: Array
    tokens: Array
    violation: Array
    role: str | None
    onset: int | None


@dataclass
class _Latent:
    """The quantities a series is made of, by role `[T, R]`; log norms are of one slot."""

    log_norm: Array
    coherence: Array
    log_tokens: Array
    violation: Array


def gradient_series(
    kind: str,
    *,
    roles: Mapping[str, int],
    num_steps: int,
    generator: np.random.Generator,
    step_noise: float = 0.0,
) -> GradientSeries:
    """Returns the series of a workflow whose roles have the given numbers of slots.

    Slots push along a direction common to all roles, one of their role and one of their own; every level
    wanders slowly (autoregressive) and every step is measured with noise. Grams are products of actual
    vectors.

    Args:
        kind: One of `CHANGES` or `HARMLESS`. `amplification`, `coherence` and `size` need a role of several
            slots.
        roles: Role to number of slots, in order.
        num_steps: T.
        generator: Source of all randomness.
        step_noise: Standard deviation of more noise in the roles' log norms, independent from step to step;
            small runs have 0.5 to 1.15.
    """
    names = list(roles)
    latent = _wandering(len(names), num_steps, generator)
    if step_noise:
        latent.log_norm += step_noise * generator.standard_normal(latent.log_norm.shape)
    changed, onset = _plant(kind, latent, list(roles.values()), generator)
    copies = np.repeat(np.arange(len(names)), list(roles.values()))
    return GradientSeries(
        gram=_grams(latent, copies, generator),
        tokens=np.exp(latent.log_tokens)[:, copies],
        violation=np.clip(latent.violation, 0.0, 1.0)[:, copies],
        role=None if changed is None else names[changed],
        onset=onset,
    )


def wander(num_steps: int, *, scale: float, memory: float, generator: np.random.Generator) -> Array:
    """Returns a stationary first-order autoregressive series of that standard deviation, `[T]`."""
    steps = generator.standard_normal(num_steps) * scale * np.sqrt(1.0 - memory**2)
    value = scale * generator.standard_normal()
    series = np.empty(num_steps)
    for row, step in enumerate(steps.tolist()):
        value = memory * value + step
        series[row] = value
    return series


def _wandering(num_roles: int, num_steps: int, generator: np.random.Generator) -> _Latent:
    """Returns levels on which nothing happens but wander."""

    def levels(low: float, high: float, scale: float) -> Array:
        columns = [
            generator.uniform(low, high)
            + wander(num_steps, scale=scale, memory=generator.uniform(0.9, 0.97), generator=generator)
            for _ in range(num_roles)
        ]
        return np.stack(columns, axis=1)

    return _Latent(
        log_norm=levels(-1.4, -0.6, 0.15),
        coherence=levels(0.0, 0.3, 0.05),
        log_tokens=levels(3.0, 5.0, 0.08),
        violation=np.abs(levels(0.0, 0.04, 0.01)),
    )


def _plant(
    kind: str, latent: _Latent, copies: Sequence[int], generator: np.random.Generator
) -> tuple[int | None, int | None]:
    """Changes the levels as the kind says; returns the changed role and the first row of the change."""
    num_steps, num_roles = latent.log_norm.shape
    several = [role for role, number in enumerate(copies) if number > 1]
    role = int(generator.integers(num_roles))
    onset = int(num_steps * generator.uniform(0.35, 0.6))
    ramp = np.clip((np.arange(num_steps) - onset) / (num_steps * generator.uniform(0.02, 0.15)), 0.0, 1.0)
    if kind == "structural":
        latent.log_norm[:, role] += generator.uniform(0.5, 1.5)
    elif kind == "growth":
        latent.log_norm[:, role] += generator.uniform(0.1, 0.25) * ramp
    elif kind == "common_growth":
        latent.log_norm += generator.uniform(0.3, 1.2) * ramp[:, None]
    elif kind == "spikes":
        hit = generator.random((num_steps, num_roles)) < 0.05
        latent.log_norm += hit * generator.exponential(1.2, (num_steps, num_roles))
    elif kind == "temporary":
        bump = np.exp(-0.5 * ((np.arange(num_steps) / num_steps - 0.5) / 0.08) ** 2)
        latent.log_norm[:, role] += generator.uniform(0.7, 1.5) * bump
    elif kind == "noisy":
        latent.log_norm += generator.uniform(0.5, 1.15) * generator.standard_normal((num_steps, num_roles))
    if kind in ("capture", "dominance", "permuted"):
        growth = max(generator.uniform(0.6, 1.5), _behind(latent, role, copies) + 0.3)
        latent.log_norm[:, role] += growth * (generator.permutation(ramp) if kind == "permuted" else ramp)
    if kind in ("capture", "drift"):
        _drift(latent, role, ramp, generator)
    if kind in ("amplification", "coherence", "size"):
        role = int(generator.choice(several))
        if kind != "size":
            latent.coherence[:, role] += generator.uniform(0.15, 0.5) * ramp
        if kind != "coherence":
            latent.log_norm[:, role] += generator.uniform(0.25, 1.0) * ramp
    if kind in (*CHANGES, "dominance", "coherence", "size"):
        return role, onset
    return None, None


def _behind(latent: _Latent, role: int, copies: Sequence[int]) -> float:
    """Returns by how much a role's log norm, over all its slots, lies below the largest other one."""
    level = latent.log_norm.mean(axis=0) + 0.5 * np.log(np.asarray(copies, dtype=np.float64))
    return float(np.delete(level, role).max() - level[role])


def _drift(latent: _Latent, captor: int, ramp: Array, generator: np.random.Generator) -> None:
    """Lets the replies of one role other than the captor drift, in length or in format."""
    others = [role for role in range(latent.log_norm.shape[1]) if role != captor]
    role = int(generator.choice(others))
    if generator.random() < 0.5:
        latent.log_tokens[:, role] += generator.choice([-1.0, 1.0]) * generator.uniform(0.35, 1.0) * ramp
    else:
        latent.violation[:, role] += generator.uniform(0.12, 0.5) * ramp


def _grams(latent: _Latent, copies: NDArray[np.intp], generator: np.random.Generator) -> Array:
    """Returns the products of slot vectors in a common, one direction a role and one a slot, `[T, K, K]`."""
    num_steps, num_roles = latent.log_norm.shape
    num_slots = copies.size
    kappa = latent.coherence[:, copies] + 0.1 * generator.standard_normal((num_steps, num_roles))[:, copies]
    kappa = np.clip(kappa, 0.0, 0.98)
    common = 0.15 * np.sqrt(kappa) + 0.1 * generator.standard_normal((num_steps, num_slots))
    own_role = np.sqrt(np.clip(kappa - common**2, 0.0, 1.0))
    private = np.sqrt(np.clip(1.0 - common**2 - own_role**2, 0.0, 1.0))
    vectors = np.zeros((num_steps, num_slots, 1 + num_roles + num_slots))
    slots = np.arange(num_slots)
    vectors[:, :, 0] = common
    vectors[:, slots, 1 + copies] = own_role
    vectors[:, slots, 1 + num_roles + slots] = private
    norms = np.exp(latent.log_norm[:, copies] + 0.25 * generator.standard_normal((num_steps, num_slots)))
    vectors *= norms[:, :, None]
    return vectors @ vectors.transpose(0, 2, 1)
