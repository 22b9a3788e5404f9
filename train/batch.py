"""From sampled rows to padded tensors: which rows share a forward pass, and how they are laid out.

Suffixes of tensors: B rows, P prompt tokens (left-padded), T completion tokens (right-padded), S = P + T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradscope.train.rollout.driver import Row

WASTE = 0.2
"""Share of padding that a pass may hold before it is split, once it holds `WASTE_TOKENS` of it: a pass over a
tiny model costs as much as some hundred tokens."""
WASTE_TOKENS = 384


@dataclass(frozen=True)
class Sample:
    """One row with what the algorithm made of it.

    Attributes:
        row: The sampled reply.
        problem: Place of its problem in the step.
        group: Key of the rows it is compared with.
        reward: Its reward; NaN when missing.
        advantage: Its advantage; NaN when the reward is missing, and the row takes no part in training.
    """

    row: Row
    problem: int
    group: tuple[object, ...]
    reward: float
    advantage: float


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass.

    Attributes:
        ids: Prompts, padded on the left, then completions, padded on the right, `[B, S]`.
        mask: 1 for tokens, 0 for padding, `[B, S]`.
        positions: Positions that count tokens only, as the rollout engine counts them, `[B, S]`.
        completion_ids: The completions alone, `[B, T]`.
        completion_mask: 1 for completion tokens, `[B, T]`.
        sampled_logprobs: Log-probabilities under the engine, 0 at padding, `[B, T]`.
        advantages: `[B]`.
        weights: Weight of one token of each row in the loss of the update, `[B]`.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    sampled_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


def split_rows(samples: Sequence[Sample], slots: Sequence[str], *, max_tokens: int) -> list[list[int]]:
    """Returns which samples share a pass: rows of similar length, at most `max_tokens` with padding.

    Inside a pass rows are ordered by slot, so that the rows of one slot stand together. A row longer than
    `max_tokens` gets a pass of its own.
    """
    shapes = [(len(sample.row.prompt_ids), len(sample.row.completion_ids)) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: (sum(shapes[i]), shapes[i], i))
    batches: list[list[int]] = []
    longest_prompt = longest_completion = used = 0
    for i in order:
        prompt, completion = shapes[i]
        size = (len(batches[-1]) if batches else 0) + 1
        wider = max(longest_prompt, prompt) + max(longest_completion, completion)
        waste = size * wider - used - prompt - completion
        fits = size * wider <= max_tokens and (waste <= WASTE_TOKENS or waste <= WASTE * size * wider)
        if not batches or not fits:
            batches.append([])
            longest_prompt = longest_completion = used = 0
        batches[-1].append(i)
        longest_prompt, longest_completion = max(longest_prompt, prompt), max(longest_completion, completion)
        used += prompt + completion
    place = {slot: k for k, slot in enumerate(slots)}
    return [sorted(batch, key=lambda i: (place[samples[i].row.slot], i)) for batch in batches]


def collate(samples: Sequence[Sample], token_weights: Sequence[float], device: torch.device) -> MicroBatch:
    """Lays rows out so that all completions begin at the same column.

    Args:
        samples: Rows of one pass.
        token_weights: Weight of one token of each of them in the loss.
        device: Where the tensors go.
    """
    num_prompt = max(len(sample.row.prompt_ids) for sample in samples)
    num_completion = max(len(sample.row.completion_ids) for sample in samples)
    ids_BS = np.zeros((len(samples), num_prompt + num_completion), dtype=np.int64)
    mask_BS = np.zeros_like(ids_BS)
    logprobs_BT = np.zeros((len(samples), num_completion), dtype=np.float32)
    for b, sample in enumerate(samples):
        prompt, completion = sample.row.prompt_ids, sample.row.completion_ids
        first, last = num_prompt - len(prompt), num_prompt + len(completion)
        ids_BS[b, first:num_prompt] = prompt
        ids_BS[b, num_prompt:last] = completion
        mask_BS[b, first:last] = 1
        logprobs_BT[b, : len(completion)] = sample.row.logprobs
    ids, mask = torch.from_numpy(ids_BS).to(device), torch.from_numpy(mask_BS).to(device)
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    return MicroBatch(
        ids=ids,
        mask=mask,
        positions=(mask.cumsum(-1) - 1).clamp(min=0),
        completion_ids=ids[:, num_prompt:],
        completion_mask=mask[:, num_prompt:],
        sampled_logprobs=torch.from_numpy(logprobs_BT).to(device),
        advantages=advantages.to(device),
        weights=torch.tensor(list(token_weights), dtype=torch.float32).to(device),
    )


def completion_logits(network: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """Returns what predicts every completion token at the sampling temperature, `[B, T, vocabulary]`."""
    num_completion = batch.completion_ids.shape[1]
    logits = network(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        position_ids=batch.positions,
        use_cache=False,
        # The last prompt token predicts the first completion token.
        logits_to_keep=num_completion + 1,
    ).logits[:, :-1]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def completion_logprobs(network: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """Returns the log-probability of every completion token at the sampling temperature, `[B, T]`."""
    scaled = completion_logits(network, batch, temperature=temperature).flatten(0, 1)
    surprise = torch.nn.functional.cross_entropy(scaled, batch.completion_ids.flatten(), reduction="none")
    return -surprise.view_as(batch.completion_ids)
