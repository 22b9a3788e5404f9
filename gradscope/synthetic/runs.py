"""Whole runs with a known fault: in a run file, or opened from one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from gradscope.errors import ConfigError, unknown_name
from gradscope.runfile import RunWriter, UpdateRecord, open_run
from gradscope.synthetic.curves import FALLING, STEADY, Curve, accuracy_curve
from gradscope.synthetic.gradients import CHANGES, HARMLESS, GradientSeries, gradient_series

Array = NDArray[np.float64]

FADING = ("no_signal", "saturated")
"""Runs without a gradient: from the start, or from the middle on."""
KINDS = ("cliff", *FALLING, *STEADY, *CHANGES, *HARMLESS, *FADING)
"""What `make_run` can plant; `cliff` is a sudden one. All else about a run is healthy."""
VOTING = {"generator": 3, "aggregator": 1}
ROWS = 24
"""Rows of each slot in a step."""
SIGNAL = 0.6
"""Chance that a row has an advantage other than 0."""


@dataclass(frozen=True)
class Truth:
    """What was planted.

    Attributes:
        kind: As asked for.
        finding: The detector that is to find it; None where nothing is to be found.
        role: The role it concerns; None where it concerns none.
        step: Training step of its onset; None where there is none.
    """

    kind: str
    finding: str | None
    role: str | None
    step: int | None


@dataclass(frozen=True)
class _Plan:
    """One run before it is written."""

    slots: Mapping[str, str]
    policies: Mapping[str, str]
    curve: Curve
    gradients: GradientSeries
    alive: NDArray[np.bool_]
    evaluate_every: int
    truth: Truth


def make_run(
    kind: str,
    *,
    seed: int,
    num_steps: int = 200,
    num_evaluations: int = 40,
    num_total: int = 400,
    roles: Mapping[str, int] | None = None,
    policy: Literal["shared", "isolated"] | None = None,
) -> tuple[xr.DataTree, Truth]:
    """Returns a run as `open_run` gives it, and what was planted in it.

    Args:
        kind: One of `KINDS`.
        seed: The same seed gives the same run.
        num_steps: Training steps, at least `num_evaluations`.
        num_evaluations: Evaluations, evenly spaced, at least 9.
        num_total: Problems of each evaluation.
        roles: Role to number of slots, in order; by default Voting's.
        policy: Whether all roles share one policy; by default they do, unless the kind concerns copies.

    Raises:
        UnknownNameError: There is no such kind.
        ConfigError: Too few steps or evaluations.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        truth = write_run(
            path,
            kind,
            seed=seed,
            num_steps=num_steps,
            num_evaluations=num_evaluations,
            num_total=num_total,
            roles=roles,
            policy=policy,
        )
        return open_run(path), truth


def write_run(
    path: str | Path,
    kind: str,
    *,
    seed: int,
    num_steps: int = 200,
    num_evaluations: int = 40,
    num_total: int = 400,
    roles: Mapping[str, int] | None = None,
    policy: Literal["shared", "isolated"] | None = None,
) -> Truth:
    """Writes a run directory with `RunWriter` and returns what was planted; arguments as for `make_run`.

    Raises:
        UnknownNameError: There is no such kind.
        ConfigError: Too few steps or evaluations.
        RunFileError: There is a run already.
    """
    if kind not in KINDS:
        raise unknown_name("kind of synthetic run", kind, KINDS)
    if not 9 <= num_evaluations <= num_steps:
        raise ConfigError(
            f"a synthetic run of {num_steps} steps and {num_evaluations} evaluations: there must be at least "
            "9 evaluations and as many steps."
        )
    generator = np.random.default_rng(seed)
    shared = policy == "shared" if policy else kind not in ("amplification", "coherence", "size")
    plan = _plan(kind, dict(roles or VOTING), shared, num_steps, num_evaluations, num_total, generator)
    with RunWriter(
        path, slots=plan.slots, policies=plan.policies, config={"synthetic": kind}, seed=seed, hardware="none"
    ) as writer:
        for step in range(num_steps):
            _write_step(writer, plan, step, generator)
    return plan.truth


def _plan(
    kind: str,
    roles: dict[str, int],
    shared: bool,
    num_steps: int,
    num_evaluations: int,
    num_total: int,
    generator: np.random.Generator,
) -> _Plan:
    shape = "sudden" if kind == "cliff" else kind if kind in (*FALLING, *STEADY) else "plateau"
    curve = accuracy_curve(shape, length=num_evaluations, num_total=num_total, generator=generator)
    change = kind if kind in (*CHANGES, *HARMLESS) else "healthy"
    gradients = gradient_series(change, roles=roles, num_steps=num_steps, generator=generator)
    alive = np.ones(num_steps, dtype=bool)
    if kind in FADING:
        alive[int(num_steps * (0.02 if kind == "no_signal" else 0.5)) :] = False
    every = num_steps // num_evaluations
    truth = Truth(kind, None, None, None)
    if curve.onset is not None:
        truth = Truth(kind, "cliff", None, curve.onset * every)
    elif kind in CHANGES:
        truth = Truth(kind, kind, gradients.role, gradients.onset)
    elif kind in FADING:
        truth = Truth(kind, "signal" if kind == "no_signal" else None, None, None)
    return _Plan(
        slots={f"{role}/{copy}": role for role, number in roles.items() for copy in range(number)},
        policies={role: "shared" if shared else role for role in roles},
        curve=curve,
        gradients=gradients,
        alive=alive,
        evaluate_every=every,
        truth=truth,
    )


def _write_step(writer: RunWriter, plan: _Plan, step: int, generator: np.random.Generator) -> None:
    slots = list(plan.slots)
    evaluation, between = divmod(step, plan.evaluate_every)
    evaluation = min(evaluation, plan.curve.accuracy.size - 1)
    accuracy = float(plan.curve.accuracy[evaluation])
    metrics = {
        "loss": float(0.1 * generator.standard_normal()),
        "episode_reward_mean": accuracy if plan.alive[step] else 0.0,
        "response_tokens_mean": dict(zip(slots, plan.gradients.tokens[step].tolist(), strict=True)),
        "violation_fraction": dict(zip(slots, plan.gradients.violation[step].tolist(), strict=True)),
        "num_rows": dict.fromkeys(slots, ROWS),
    }
    writer.append(step, list(_records(plan, step, generator)), metrics=metrics)
    if not between and step // plan.evaluate_every < plan.curve.accuracy.size:
        writer.append_evaluation(
            step,
            num_correct=int(plan.curve.num_correct[evaluation]),
            num_total=plan.curve.num_total,
            dataset="held_out",
            temperature=0.7,
        )


def _records(plan: _Plan, step: int, generator: np.random.Generator) -> Iterator[UpdateRecord]:
    """Yields one record for each policy: its own slots' part of the Gram."""
    slots = list(plan.slots)
    owners = [plan.policies[plan.slots[slot]] for slot in slots]
    for policy in dict.fromkeys(owners):
        own = [place for place, owner in enumerate(owners) if owner == policy]
        gram = plan.gradients.gram[step][np.ix_(own, own)]
        signal = 1 + generator.binomial(ROWS - 1, SIGNAL, size=len(own)).astype(np.float64)
        if not plan.alive[step]:
            gram, signal = np.zeros_like(gram), np.zeros_like(signal)
        yield UpdateRecord(
            policy=policy,
            slots=tuple(slots[place] for place in own),
            gram=gram,
            counts={"num_rows": np.full(len(own), float(ROWS)), "num_signal_rows": signal},
            scalars={"grad_norm": float(np.sqrt(max(gram.sum(), 0.0))), "learning_rate": 1e-4},
        )
