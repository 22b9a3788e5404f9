"""Runs of one workflow side by side, in sentences: what rose, what differs, what one seed hides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import xarray as xr

from gradscope.derive import difference_interval, policies, role_norms, role_shares
from gradscope.errors import RunFileError
from gradscope.stats.evaluations import Setting, evaluation_series

Count = tuple[float, float]


@dataclass(frozen=True)
class Progress:
    """The first and the last evaluation of one kind; each (correct, total)."""

    first: Count
    last: Count

    @property
    def gain(self) -> float:
        """Rise of the accuracy."""
        return self.last[0] / self.last[1] - self.first[0] / self.first[1]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the rise."""
        return difference_interval(self.first, self.last)


def progress(run: xr.DataTree) -> dict[Setting, Progress]:
    """Returns the first and last evaluation of every setting that was evaluated at two steps or more."""
    return {
        setting: Progress(*((float(own.correct[at]), float(own.total[at])) for at in (0, -1)))
        for setting, own in evaluation_series(run).items()
        if own.correct.size > 1
    }


def contrast(runs: Mapping[str, xr.DataTree]) -> list[str]:
    """Returns sentences that compare runs, given by the names that the sentences use.

    Raises:
        RunFileError: A run has fewer than two sampled evaluations of one kind.
    """
    found = {name: progress(run) for name, run in runs.items()}
    for name, own in found.items():
        if all(setting.greedy for setting in own):
            raise RunFileError(
                f"{name}: fewer than two sampled evaluations, so no rise can be told. Set evaluate.every=10."
            )
    return [*_rises(found), *_differences(found), *_gradients(runs), *_caveats(runs)]


def _rises(found: Mapping[str, Mapping[Setting, Progress]]) -> Iterator[str]:
    for name, own in found.items():
        greedy = {setting.dataset: each for setting, each in own.items() if setting.greedy}
        for setting, sampled in own.items():
            if setting.greedy:
                continue
            text = (
                f"{name}, {setting}: accuracy went from {_share(sampled.first)} to {_share(sampled.last)} "
                f"({_signed(sampled)}, n = {sampled.last[1]:.0f})"
            )
            if certain := greedy.get(setting.dataset):
                text += (
                    f", greedy accuracy from {_share(certain.first)} to {_share(certain.last)} "
                    f"({_signed(certain)}). {_skill(sampled, certain)}"
                )
            yield text if text.endswith(".") else f"{text}."


def _skill(sampled: Progress, greedy: Progress) -> str:
    if sampled.interval[0] <= 0:
        return "The sampled rise is within the noise of the evaluation."
    if greedy.interval[0] <= 0:
        return (
            "The greedy rise is within the noise of its evaluation: as far as can be told, samples moved "
            "towards what the model already answered with its most probable tokens (sharpening), and no new "
            "skill shows."
        )
    return "Greedy answers rose too, so part of the rise is more than sharper sampling."


def _differences(found: Mapping[str, Mapping[Setting, Progress]]) -> Iterator[str]:
    for (name_a, a), (name_b, b) in combinations(found.items(), 2):
        shared = [setting for setting in a if setting in b and not setting.greedy]
        if not shared:
            yield f"{name_b} minus {name_a}: no setting was evaluated in both, so nothing can be compared."
        for setting in shared:
            last = Progress(a[setting].last, b[setting].last)
            low, high = last.interval
            verdict = "these two runs differ" if low > 0 or high < 0 else "no difference can be told"
            yield (
                f"Last accuracy on {setting}, {name_b} minus {name_a}: {last.gain:+.3f} "
                f"(95 % {low:+.3f} to {high:+.3f}): {verdict}."
            )


def _gradients(runs: Mapping[str, xr.DataTree]) -> Iterator[str]:
    for name, run in runs.items():
        for policy in policies(run):
            try:
                norms, shares = role_norms(run, policy), role_shares(run, policy)
            except RunFileError:
                yield f"{name}: the log holds no gradients."
                break
            roles = [str(role) for role in norms["role"].values]
            # A step without signal has a gradient of exactly zero, which says nothing about the roles.
            signal = norms.where(norms > 0)
            sizes = ", ".join(f"{role} {_median(signal.sel(role=role)):.3g}" for role in roles)
            num_steps = int((signal > 0).any("role").sum())
            text = (
                f"{name}, policy '{policy}': median gradient norm over {num_steps} steps with signal: {sizes}"
            )
            if len(roles) > 1:
                text += f"; energy share: {', '.join(_energy(shares, role) for role in roles)}"
            else:
                text += "; it has no share, since no other role uses these parameters"
            yield f"{text}."


def _caveats(runs: Mapping[str, xr.DataTree]) -> Iterator[str]:
    yield (
        f"Each of the {len(runs)} runs is one seed. Two runs of one cell that differ only by their seed "
        "can be as far apart as these, so nothing here says that one policy is better; ten seeds would."
    )
    yield (
        "The intervals cover the held-out problems that were drawn, not the seed. Shares and norms say which "
        "gradients were large, not which of them made the accuracy move."
    )


def _energy(shares: xr.Dataset, role: str) -> str:
    """Returns a role's energy share, with what its counts alone would give where rows were counted."""
    text = f"{role} {_median(shares['energy'].sel(role=role)):.0%}"
    if "expected_energy" not in shares:
        return text
    return f"{text} (by rows alone {_median(shares['expected_energy'].sel(role=role)):.0%})"


def _median(values: xr.DataArray) -> float:
    present = values.values[~np.isnan(values.values)]
    return float(np.median(present)) if present.size else float("nan")


def _share(count: Count) -> str:
    return f"{count[0] / count[1]:.3f}"


def _signed(found: Progress) -> str:
    low, high = found.interval
    return f"{found.gain:+.3f}, 95 % {low:+.3f} to {high:+.3f}"
