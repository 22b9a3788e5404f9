"""Learning signal: whether enough rows had an advantage other than 0 for gradients to mean anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from gradscope.detectors.finding import Evidence, Finding
from gradscope.detectors.series import all_steps, need, slot_roles, sound, table
from gradscope.detectors.wording import percent
from gradscope.stats.windows import FEWEST_VALID, FRACTION, SHORTEST

DEAD = 0.1
"""With signal in fewer steps than this fraction, there is none to speak of."""
SPARSE = 0.5
"""With signal in fewer steps than this fraction, medians over windows rest on few steps."""


@dataclass(frozen=True)
class Signal:
    """How often rows of some slots had an advantage other than 0.

    Attributes:
        num_rows: Rows over the whole run.
        num_signal: Those with an advantage other than 0.
        alive: Steps in which at least one had.
        num_alive_last: Of these, steps in the last fifth of the run (ten steps at least).
        num_steps: Steps of the run.
        last_step: The last step of the run.
    """

    num_rows: float
    num_signal: float
    alive: tuple[float, ...]
    num_alive_last: int
    num_steps: int
    last_step: float

    @property
    def strength(self) -> str:
        """Verdict on the lack of signal."""
        fraction = len(self.alive) / self.num_steps
        if fraction < DEAD:
            return "strong"
        faded = self.num_alive_last < min(FEWEST_VALID, self.num_steps)
        return "possible" if fraction < SPARSE or faded else "none"

    def counts(self) -> str:
        """Returns the counts as the end of a sentence."""
        share = f" ({percent(self.num_signal / self.num_rows)})" if self.num_rows else ""
        return (
            f"{self.num_signal:.0f} of {self.num_rows:.0f} rows{share} had an advantage other than 0, and "
            f"{len(self.alive)} of {self.num_steps} steps held such a row"
        )


def detect(run: xr.DataTree) -> list[Finding]:
    """Says in how many rows and steps there was an advantage other than 0; little of it is a finding.

    Raises:
        Skipped: The run does not count rows with signal, or its counts cannot be.
    """
    updates = need(run, "updates", "num_rows", "num_signal_rows", "step")
    sound(updates, "updates", "num_signal_rows", largest=sound(updates, "updates", "num_rows"))
    roles = slot_roles(run)
    reward = _mean_reward(run)
    steps = all_steps(run)
    whole = _finding(_measure(updates, list(roles), steps), None, reward)
    if not whole.quiet:
        return [whole]
    by_role = []
    for role in dict.fromkeys(roles.values()):
        own = [slot for slot, name in roles.items() if name == role]
        by_role.append(_finding(_measure(updates, own, steps), role, reward))
    return [whole, *(finding for finding in by_role if not finding.quiet)]


def _measure(updates: xr.Dataset, slots: list[str], steps: np.ndarray) -> Signal:
    rows = updates["num_rows"].sel(slot=slots)
    signal = updates["num_signal_rows"].sel(slot=slots)
    alive = np.unique(updates["step"].values[(signal.sum("slot") > 0).values])
    last = steps[-max(SHORTEST, int(np.ceil(FRACTION * steps.size))) :]
    return Signal(
        num_rows=float(rows.sum()),
        num_signal=float(signal.sum()),
        alive=tuple(alive.astype(float).tolist()),
        num_alive_last=int((alive >= last[0]).sum()),
        num_steps=int(steps.size),
        last_step=float(steps[-1]),
    )


def _mean_reward(run: xr.DataTree) -> float:
    train = table(run, "train")
    if "episode_reward_mean" not in train or not train["episode_reward_mean"].notnull().any():
        return float("nan")
    return float(train["episode_reward_mean"].mean())


def _finding(signal: Signal, role: str | None, reward: float) -> Finding:
    last = signal.alive[-1] if signal.alive else float("nan")
    evidence: Evidence = {
        "row_fraction": signal.num_signal / signal.num_rows if signal.num_rows else float("nan"),
        "step_fraction": len(signal.alive) / signal.num_steps,
        "num_steps": signal.num_steps,
        "last_step_with_signal": last,
        "episode_reward_mean": reward,
    }
    return Finding("signal", role, None, signal.strength, evidence, _sentence(signal, role, reward, last))


def _sentence(signal: Signal, role: str | None, reward: float, last: float) -> str:
    where = f" for role '{role}'" if role else ""
    if signal.strength == "none":
        return f"Lack of signal: no. {signal.counts()}."
    head = "No signal to speak of" if signal.strength == "strong" else "Little signal"
    context = f" The last such step is step {last:g}." if signal.alive else ""
    if np.isfinite(reward):
        context += f" The mean episode reward was {reward:.3g}."
    often = len(signal.alive) >= SPARSE * signal.num_steps
    if signal.strength != "strong" and often and last < signal.last_step:
        head = "Signal faded out"
    return (
        f"{head}{where}: {signal.counts()}.{context} Without it a gradient is zero or noise, so shares, "
        "alignment and coherence mean nothing in those steps, and they are left out."
    )
