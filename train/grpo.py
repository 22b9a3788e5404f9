"""GRPO as pure functions: advantages of groups, token weights of the loss, the clipped surrogate.

Suffixes of tensors: N rows, B rows of a micro-batch, T completion tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import torch

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "batch_std", "none"]
Aggregation = Literal["sequence_mean_token_mean", "token_mean", "fixed_length", "sequence_sum"]
Array = NDArray[np.float64]


def group_advantages(
    rewards: ArrayLike,
    group_ids: Sequence[Hashable] | NDArray[np.generic],
    *,
    baseline: Baseline | ArrayLike = "mean",
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
) -> Array:
    """Compares the rewards of each group with one another (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: `[N]`; NaN is a missing reward, which takes no part and gets NaN.
        group_ids: `[N]`, which group each reward belongs to.
        baseline: What is subtracted: the group's mean, the mean of its other members (RLOO), nothing, or
            given values `[N]`.
        scale: What the difference is divided by, `eps` added: the deviation of the group, of all present
            rewards, or nothing (then `eps` plays no part).
        ddof: Degrees of freedom taken off in the deviation.
        eps: Added to the deviation.
        singleton: A group of one has no deviation and nothing to compare with: `zero` gives 0, `raw` treats
            the mean as 0 and the deviation as 1, as verl does.

    Returns:
        `[N]` float64. A group whose rewards are all equal is exactly 0, unless they are compared with a given
        baseline or with none and not divided by the group's deviation.

    Raises:
        ValueError: The lengths differ.
    """
    rewards_N = np.asarray(rewards, dtype=np.float64)
    groups_N = _group_numbers(group_ids)
    given = None if isinstance(baseline, str) else np.asarray(baseline, dtype=np.float64)
    if rewards_N.ndim != 1 or groups_N.shape != rewards_N.shape:
        raise ValueError(
            f"rewards have shape {rewards_N.shape}, group ids {groups_N.shape}; both must be [N]"
        )
    if given is not None and given.shape != rewards_N.shape:
        raise ValueError(f"the baseline has shape {given.shape}, the rewards {rewards_N.shape}")
    present_N = ~np.isnan(rewards_N)
    batch_deviation = _deviation(rewards_N[present_N], ddof)
    # A fixed or absent baseline compares a reward with something outside its group.
    within_group = scale == "std" or (given is None and baseline != "none")
    advantages_N = np.full(rewards_N.shape, np.nan)
    for group in np.unique(groups_N[present_N]):
        members = np.flatnonzero((groups_N == group) & present_N)
        values = rewards_N[members]
        raw = len(members) == 1 and singleton == "raw"
        # Equal rewards need no arithmetic, whose rounding would leave a residue to be divided by eps.
        if within_group and not raw and values.max() == values.min():
            advantages_N[members] = 0.0
            continue
        centred = values - (given[members] if given is not None else _baseline(values, str(baseline)))
        deviation = batch_deviation if scale == "batch_std" else _deviation(values, ddof)
        advantages_N[members] = centred if scale == "none" else centred / (deviation + eps)
    return advantages_N


def _group_numbers(group_ids: Sequence[Hashable] | NDArray[np.generic]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    ids = group_ids.tolist() if isinstance(group_ids, np.ndarray) else group_ids
    return np.array([numbers.setdefault(group, len(numbers)) for group in ids], dtype=np.int64)


def _baseline(values: Array, baseline: str) -> Array:
    if baseline == "none" or len(values) == 1:
        return np.zeros_like(values)
    if baseline == "leave_one_out":
        return (values.sum() - values) / (len(values) - 1)
    return np.full_like(values, values.mean())


def _deviation(values: Array, ddof: int) -> float:
    """Returns the standard deviation; 1 of a single value, as in verl, and exactly 0 of equal ones."""
    if len(values) < 2:
        return 1.0
    return 0.0 if values.max() == values.min() else float(values.std(ddof=ddof))


def token_weights(lengths: ArrayLike, aggregation: Aggregation, *, fixed_length: int | None = None) -> Array:
    """Returns the weight of one token of each row in the loss of one update.

    The loss of an update is the sum over its tokens of weight x token loss, so it does not depend on padding
    or on how rows are split into micro-batches.

    Args:
        lengths: `[N]`, tokens of each row of the update that count in the loss; 0 for a row that does not.
        aggregation: `sequence_mean_token_mean`: mean over rows of each row's token mean; `token_mean`: mean
            over all tokens; `fixed_length`: mean over rows of the token sum / `fixed_length` (Dr. GRPO,
            arXiv 2503.20783); `sequence_sum`: mean over rows of the token sum.
        fixed_length: The divisor of `fixed_length`.

    Returns:
        `[N]` float64; 0 for rows of length 0, which do not count in the denominators either.
    """
    lengths_N = np.asarray(lengths, dtype=np.float64)
    counted_N = lengths_N > 0
    num_rows = max(int(counted_N.sum()), 1)
    if aggregation == "token_mean":
        weights_N = np.full(lengths_N.shape, 1.0 / max(lengths_N.sum(), 1.0))
    elif aggregation == "sequence_sum":
        weights_N = np.full(lengths_N.shape, 1.0 / num_rows)
    elif aggregation == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ValueError(f"aggregation fixed_length needs a length of at least 1, found {fixed_length}")
        weights_N = np.full(lengths_N.shape, 1.0 / (num_rows * fixed_length))
    else:
        weights_N = 1.0 / (num_rows * np.maximum(lengths_N, 1.0))
    return np.where(counted_N, weights_N, 0.0)


def clipped_surrogate(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the clipped policy loss of each token (PPO, arXiv 1707.06347, equation 7; clip-higher of DAPO).

    Args:
        logprobs_BT: Log-probabilities under the policy that is trained.
        old_logprobs_BT: Log-probabilities under the policy that sampled, without gradient.
        advantages_B: One advantage a row.
        clip_low: The ratio is kept above 1 - clip_low where the advantage is negative.
        clip_high: The ratio is kept below 1 + clip_high where the advantage is positive.

    Returns:
        The loss `[B, T]`, and a boolean `[B, T]` that says where clipping took the gradient away.
    """
    ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    advantages_B1 = advantages_B.unsqueeze(-1)
    unclipped_loss_BT = -ratio_BT * advantages_B1
    clipped_loss_BT = -clipped_BT * advantages_B1
    return unclipped_loss_BT.maximum(clipped_loss_BT), (clipped_loss_BT > unclipped_loss_BT).detach()
