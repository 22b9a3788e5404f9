"""Online early warning: says when a gradient has left its own recent regime, in size and in direction."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscope.errors import ConfigError, SchemaError


@dataclass(frozen=True)
class WarnerSettings:
    """How the warner looks back and when it speaks.

    Attributes:
        threshold: Both averaged z must exceed it.
        memory: Observations in the reference window.
        gap: Latest observations that are kept out of the reference, so that a slow change is not absorbed.
        fewest: Observations in the reference before anything is judged.
        smoothing: Weight of the newest z in its running average.
        clip: Largest magnitude of one z, so that no single spike warns.
    """

    threshold: float = 0.9
    memory: int = 150
    gap: int = 20
    fewest: int = 80
    smoothing: float = 0.1
    clip: float = 4.0

    def __post_init__(self) -> None:
        if not (0.0 < self.smoothing <= 1.0 and self.clip > self.threshold > 0.0):
            raise ConfigError(
                f"WarnerSettings: smoothing {self.smoothing:g} must lie in (0, 1] and threshold "
                f"{self.threshold:g} between 0 and clip {self.clip:g}."
            )
        if not (1 < self.fewest <= self.memory and self.gap >= 0):
            raise ConfigError(
                f"WarnerSettings: fewest {self.fewest} must lie between 2 and memory {self.memory}, "
                f"and gap {self.gap} must not be negative."
            )


class Warner:
    """Watches the gradient of one role, or of one policy, without looking ahead.

    Each value is compared with the median and the median absolute deviation of an earlier window (150 values
    that end 20 before it), clipped, and averaged exponentially. A warning needs BOTH the log norm and the
    coherence kappa to stand above their reference: spikes and harmless shifts of one alone do not warn
    (docs/detectors.md). It means: gradient regime changed. It does not mean that a cliff
    will come: not every cliff is announced in gradients, and not every change of regime ends in one.

    False alarms at the default threshold, in simulated runs of 600 steps in which nothing happens
    (`tests/benchmarks/false_alarms.py --runs 1000`): none where steps are independent; where both values also
    wander slowly (autoregressive, 0.97 a step), 12 % with a wander half as large as the step noise and 46 %
    with one as large. Watch that share, with `replay`, before acting on a warning.

    Attributes:
        num_observations: Usable observations so far.
        z_log_norm: Running average of the log norm's z; NaN until there is a reference.
        z_coherence: The same of the coherence.
    """

    def __init__(self, settings: WarnerSettings | None = None) -> None:
        if not isinstance(settings, WarnerSettings | None):
            raise ConfigError(f"Warner takes WarnerSettings, not {type(settings).__name__} {settings!r}.")
        self.settings = settings or WarnerSettings()
        self.num_observations = 0
        self.z_log_norm = math.nan
        self.z_coherence = math.nan
        length = self.settings.memory + self.settings.gap
        self._history: deque[tuple[float, float]] = deque(maxlen=length)

    def update(self, log_norm: float, coherence: float) -> bool:
        """Takes one step's values and returns whether the regime stands changed now.

        Args:
            log_norm: Log of the gradient's norm before clipping, such as half the log of the Gram's trace.
            coherence: kappa of the role's copies, or of the policy's roles.

        Returns:
            False also for a step with a missing or infinite value: it is passed over and changes nothing.

        Raises:
            SchemaError: A value is no real number.
        """
        log_norm, coherence = _number("log_norm", log_norm), _number("coherence", coherence)
        if not (math.isfinite(log_norm) and math.isfinite(coherence)):
            return False
        reference = np.array(list(self._history)[: max(0, len(self._history) - self.settings.gap)])
        if len(reference) >= self.settings.fewest:
            z = self._deviation(reference, np.array([log_norm, coherence]))
            self.z_log_norm = self._averaged(self.z_log_norm, float(z[0]))
            self.z_coherence = self._averaged(self.z_coherence, float(z[1]))
        self._history.append((float(log_norm), float(coherence)))
        self.num_observations += 1
        return min(self.z_log_norm, self.z_coherence) > self.settings.threshold

    def _deviation(self, reference: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the clipped robust z of both values."""
        return np.clip(robust_deviation(reference, values), -self.settings.clip, self.settings.clip)

    def _averaged(self, average: float, z: float) -> float:
        start = 0.0 if math.isnan(average) else average
        return start + self.settings.smoothing * (z - start)


def robust_deviation(reference: NDArray[np.float64], values: ArrayLike) -> NDArray[np.float64]:
    """Returns how far values are from the median of a reference, in its robust standard deviations.

    These are 1.4826 median absolute deviations. A constant reference has no scale: any visible change from it
    is a huge deviation.

    Args:
        reference: `[T, ...]`.
        values: `[...]`.
    """
    centre = np.median(reference, axis=0)
    scale = 1.4826 * np.median(np.abs(reference - centre), axis=0)
    scale = np.maximum(scale, 1e-9 * np.maximum(1.0, np.abs(centre)))
    return np.asarray((np.asarray(values) - centre) / scale)


def _number(name: str, value: float) -> float:
    if isinstance(value, str):
        raise SchemaError(f"Warner.update: {name} is '{value}': give a number, NaN where there is none.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"Warner.update: {name} must be one real number: {error}.") from error


def replay(
    log_norm: ArrayLike, coherence: ArrayLike, *, settings: WarnerSettings | None = None
) -> NDArray[np.bool_]:
    """Returns at which steps of a recorded run the warner would have spoken, `[T]`.

    Args:
        log_norm: `[T]`, NaN where there was no signal.
        coherence: `[T]`, likewise.
        settings: As for `Warner`.

    Raises:
        SchemaError: The two are not series of one length.
    """
    sizes, kappas = np.asarray(log_norm, dtype=np.float64), np.asarray(coherence, dtype=np.float64)
    if sizes.ndim != 1 or sizes.shape != kappas.shape:
        raise SchemaError(
            f"log_norm has shape {sizes.shape}, coherence {kappas.shape}: expected [T] for both."
        )
    warner = Warner(settings)
    return np.array(
        [warner.update(*pair) for pair in zip(sizes.tolist(), kappas.tolist(), strict=True)], dtype=bool
    )
