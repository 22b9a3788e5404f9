"""One update: one optimizer step of one policy on its rows of a minibatch.

Suffixes of tensors: B rows of a pass, T completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gradscope.runfile.update import UpdateRecord
from gradscope.train.batch import (
    MicroBatch,
    Sample,
    collate,
    completion_logits,
    completion_logprobs,
    split_rows,
)
from gradscope.train.config.sections import Config
from gradscope.train.grpo import clipped_surrogate, token_weights
from gradscope.train.policy import Policies
from gradscope.train.probing import Probe

INFLUENCE_ROWS = 8
"""Replies of a slot, spread over the update's, on which functional influence is measured."""


@dataclass(frozen=True)
class TokenSums:
    """Sums over the completion tokens of one row that went through the trainer.

    Attributes:
        num_tokens: Tokens.
        divergence: Of the sampler from the trainer, k3 estimator (Schulman 2020): e^d - d - 1 with d the
            trainer's log-probability minus the sampler's.
        num_clipped: Tokens whose gradient clipping took away.
    """

    num_tokens: int
    divergence: float
    num_clipped: float


@dataclass(frozen=True)
class UpdateReport:
    """What an update did.

    Attributes:
        loss: The loss of the update.
        record: Its entry of the run file; attribution fills in while the optimizer steps.
        tokens: Row id to sums over its tokens, for rows that went through the trainer.
        nonfinite: Whether the gradient was not finite, so that the step was skipped.
    """

    loss: float
    record: UpdateRecord
    tokens: dict[str, TokenSums] = field(default_factory=dict)
    nonfinite: bool = False


class Updater:
    """Turns samples into optimizer steps.

    Args:
        policies: Adapters and their optimizers.
        config: Configuration of the run.
        roles: Slot to role, in the workflow's order.
        probe: Measures slot gradients.
    """

    def __init__(self, policies: Policies, config: Config, *, roles: Mapping[str, str], probe: Probe) -> None:
        self.policies = policies
        self.config = config
        self.slots = tuple(roles)
        self.probe = probe
        self.device = next(policies.network.parameters()).device

    def update(
        self, policy: str, samples: Sequence[Sample], *, minibatch: int, learning_rate: float
    ) -> UpdateReport:
        """Takes one optimizer step of `policy` on all of `samples`.

        Rows whose advantage is 0 have exactly no gradient. They are counted in every denominator, but spared
        the passes through the model.

        Args:
            policy: Policy to update.
            samples: Its rows, each with a reward.
            minibatch: Number of the update among those of its policy and step. The first one finds the policy
                that sampled, so that the ratio is exactly 1; later ones compare with the sampler.
            learning_rate: Learning rate of the step.
        """
        self.policies.activate(policy)
        algorithm = self.config.algorithm
        weights_N = token_weights(
            [len(sample.row.completion_ids) for sample in samples],
            algorithm.aggregation,
            fixed_length=self.config.rollout.max_new_tokens,
        )
        weights: list[float] = weights_N.tolist()
        quiet = [i for i, sample in enumerate(samples) if sample.advantage == 0]
        if quiet:
            with self.probe.rows([samples[i] for i in quiet], [weights[i] for i in quiet]):
                pass
        signal = [i for i, sample in enumerate(samples) if sample.advantage != 0]
        chosen = [samples[i] for i in signal]
        loss, tokens = 0.0, {}
        for places in split_rows(chosen, self.slots, max_tokens=self.config.train.micro_batch_tokens):
            rows = [chosen[i] for i in places]
            part, sums = self._accumulate(
                rows, [weights[signal[i]] for i in places], on_policy=minibatch == 0
            )
            loss += part
            tokens.update(sums)
        record = self.probe.step(self.policies.optimizers[policy])
        if record is None:
            record = self._unmeasured(policy, samples, weights)
        record.scalars["minibatch"] = minibatch
        nonfinite = self._step(policy, record, learning_rate=learning_rate)
        self.probe.influence(lambda slot: self._logits_of(slot, samples))
        return UpdateReport(loss, record, tokens, nonfinite)

    def _accumulate(
        self, samples: Sequence[Sample], weights: Sequence[float], *, on_policy: bool
    ) -> tuple[float, dict[str, TokenSums]]:
        """Adds the gradient of some rows; returns their part of the loss, and sums over their tokens."""
        algorithm = self.config.algorithm
        batch = collate(samples, weights, self.device)
        with self.probe.rows(samples, weights):
            logprobs_BT = completion_logprobs(
                self.policies.network, batch, temperature=self.config.rollout.temperature
            )
            loss_BT, clipped_BT = clipped_surrogate(
                logprobs_BT,
                logprobs_BT.detach() if on_policy else batch.sampled_logprobs,
                batch.advantages,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
            loss = (loss_BT * batch.completion_mask * batch.weights.unsqueeze(-1)).sum()
            loss.backward()
        return float(loss.detach()), _token_sums(samples, batch, logprobs_BT.detach(), clipped_BT)

    def _logits_of(self, slot: str, samples: Sequence[Sample]) -> torch.Tensor | None:
        """Returns what predicts the tokens of some of a slot's replies, `[tokens, vocabulary]`."""
        own = [sample for sample in samples if sample.row.slot == slot]
        if not own:
            return None
        chosen = own[:: -(-len(own) // INFLUENCE_ROWS)]
        batch = collate(chosen, [0.0] * len(chosen), self.device)
        logits_BTV = completion_logits(
            self.policies.network, batch, temperature=self.config.rollout.temperature
        )
        return logits_BTV[batch.completion_mask.bool()]

    def _step(self, policy: str, record: UpdateRecord, *, learning_rate: float) -> bool:
        """Clips and applies the accumulated gradient; returns whether it was not finite and left out."""
        optimizer = self.policies.optimizers[policy]
        parameters = list(self.policies.parameters(policy).values())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for parameter in parameters:
            # Without rows of signal the gradient is 0, which moves AdamW by its momentum; None would not.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        max_norm = self.config.optim.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        nonfinite = not math.isfinite(norm)
        # The probe's norm is of the same gradient, in double precision.
        record.scalars.setdefault("grad_norm", norm)
        record.scalars.update(
            learning_rate=learning_rate,
            # As torch.nn.utils.clip_grad_norm_ computes it.
            clip_factor=math.nan if nonfinite else min(1.0, max_norm / (norm + 1e-6)),
            skipped=float(nonfinite),
        )
        if not nonfinite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return nonfinite

    def _unmeasured(self, policy: str, samples: Sequence[Sample], weights: Sequence[float]) -> UpdateRecord:
        """Returns the record of an update whose gradients nobody measured: counts only."""
        num_slots = len(self.slots)
        names = ("num_rows", "num_signal_rows", "num_tokens", "advantage_abs_sum", "loss_weight")
        counts = {name: np.full(num_slots, np.nan) for name in names}
        for values in counts.values():
            values[[self.slots.index(slot) for slot in self.policies.slots_of(policy)]] = 0.0
        for sample, weight in zip(samples, weights, strict=True):
            slot, num_tokens = self.slots.index(sample.row.slot), len(sample.row.completion_ids)
            counts["num_rows"][slot] += 1
            counts["num_signal_rows"][slot] += sample.advantage != 0
            counts["num_tokens"][slot] += num_tokens
            counts["advantage_abs_sum"][slot] += abs(sample.advantage)
            counts["loss_weight"][slot] += weight * num_tokens
        return UpdateRecord(policy, self.slots, np.full((num_slots, num_slots), np.nan), counts)


def _token_sums(
    samples: Sequence[Sample], batch: MicroBatch, logprobs_BT: torch.Tensor, clipped_BT: torch.Tensor
) -> dict[str, TokenSums]:
    difference_BT = ((logprobs_BT - batch.sampled_logprobs) * batch.completion_mask).double()
    divergence_B = (difference_BT.expm1() - difference_BT).sum(-1).tolist()
    clipped_B = (clipped_BT * batch.completion_mask).sum(-1).tolist()
    return {
        sample.row.id: TokenSums(len(sample.row.completion_ids), divergence, clipped)
        for sample, divergence, clipped in zip(samples, divergence_B, clipped_B, strict=True)
    }
