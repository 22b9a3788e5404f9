"""Samples with the model that is trained, in place: a plain decode loop over a transformers cache.

Suffixes of tensors: B live rows, U distinct prompts, P prompt tokens (left-padded), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from gradscope.train.rollout.engine import Completion, Request


class HFEngine:
    """Completes prompts by sampling from a transformers model.

    Args:
        model: Causal language model, adapters included, in evaluation mode.
        activate: Makes a named policy the active one.
        end_ids: Token ids that end a reply.
        temperature: Sampling temperature.
        max_new_tokens: Longest reply.
        max_batch_rows: Rows decoded side by side.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        activate: Callable[[str], None],
        *,
        end_ids: Sequence[int],
        temperature: float,
        max_new_tokens: int,
        max_batch_rows: int,
    ) -> None:
        self.model = model
        self.activate = activate
        self.device = next(model.parameters()).device
        self.end_ids = torch.tensor(sorted(end_ids), device=self.device)
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.max_batch_rows = max_batch_rows
        # transformers renames this argument of every model; both names are in use.
        accepted = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"

    def generate(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Completion]:
        """Returns one completion a request, in order; rows are batched by policy and prompt length."""
        completions: dict[int, Completion] = {}
        for policy in dict.fromkeys(request.policy for request in requests):
            mine = [i for i, request in enumerate(requests) if request.policy == policy]
            mine.sort(key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
            self.activate(policy)
            for start in range(0, len(mine), self.max_batch_rows):
                chunk = mine[start : start + self.max_batch_rows]
                sampled = self._decode([requests[i] for i in chunk], greedy=greedy)
                completions.update(zip(chunk, sampled, strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _decode(self, requests: Sequence[Request], *, greedy: bool) -> list[Completion]:
        batch = self._prefill(requests)
        uniforms = np.stack([request.uniforms[: self.max_new_tokens] for request in requests], axis=1)
        uniforms_TB = torch.from_numpy(uniforms).to(self.device)
        record = _Record(len(requests), self.max_new_tokens, self.device)
        for step in range(self.max_new_tokens):
            tokens_B, logprobs_B, entropy_B = sample(
                batch.logits, uniforms_TB[step, batch.rows], temperature=self.temperature, greedy=greedy
            )
            record.write(step, batch.rows, tokens_B, logprobs_B, entropy_B)
            batch.done |= torch.isin(tokens_B, self.end_ids)
            num_done = int(batch.done.sum())
            if num_done == len(batch.done) or step + 1 == self.max_new_tokens:
                break
            if 2 * num_done >= len(batch.done):
                kept = batch.select((~batch.done).nonzero().squeeze(-1))
                tokens_B = tokens_B[kept]
            self._advance(batch, tokens_B)
        return record.completions(self.end_ids.tolist())

    def _prefill(self, requests: Sequence[Request]) -> _Batch:
        """Runs every distinct prompt once and repeats its cache for the rows that share it."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(r.prompt_ids for r in requests))}
        longest = max(map(len, distinct))
        ids = np.zeros((len(distinct), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for prompt, i in distinct.items():
            ids[i, longest - len(prompt) :] = prompt
            mask[i, longest - len(prompt) :] = 1
        mask_UP = torch.from_numpy(mask).to(self.device)
        cache = DynamicCache(config=self.model.config)
        logits_UV = self._forward(
            torch.from_numpy(ids).to(self.device), mask_UP, (mask_UP.cumsum(-1) - 1).clamp(min=0), cache
        )
        rows_B = torch.tensor([distinct[request.prompt_ids] for request in requests], device=self.device)
        if len(distinct) < len(requests):
            cache.batch_select_indices(rows_B)
        return _Batch(
            cache=cache,
            mask=mask_UP[rows_B],
            logits=logits_UV[rows_B],
            rows=torch.arange(len(requests), device=self.device),
            done=torch.zeros(len(requests), dtype=torch.bool, device=self.device),
        )

    def _advance(self, batch: _Batch, tokens_B: torch.Tensor) -> None:
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=1)
        positions_B1 = batch.mask.sum(-1, keepdim=True) - 1
        batch.logits = self._forward(tokens_B.unsqueeze(-1), batch.mask, positions_B1, batch.cache)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        options: dict[str, Any] = {self.cache_argument: cache}
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **options,
        )
        return output.logits[:, -1].float()


def sample(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, *, temperature: float, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws one token a row by inverse CDF.

    Returns:
        Token ids `[B]`, and their log-probability and the entropy of the distribution, both at the
        temperature, `[B]`.
    """
    logprobs_BV = torch.log_softmax(logits_BV / temperature, dim=-1)
    probabilities_BV = logprobs_BV.exp()
    # A token of probability 0 leaves the CDF where it is, so no uniform number falls on it.
    if greedy:
        tokens_B = logits_BV.argmax(-1)
    else:
        cdf_BV = probabilities_BV.double().cumsum(-1)
        target_B1 = (uniforms_B * cdf_BV[:, -1]).unsqueeze(-1)
        tokens_B = torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(-1)
        tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
    # 0 * log 0 is 0 in an entropy, though not in floating point.
    entropy_B = -(probabilities_BV * logprobs_BV.clamp(min=-1e4)).sum(-1)
    return tokens_B, logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1), entropy_B


@dataclass
class _Batch:
    """The live rows of a decode loop.

    Attributes:
        cache: Keys and values so far.
        mask: 1 for tokens, 0 for padding, `[B, P]` and growing.
        logits: Scores of the next token, `[B, V]`.
        rows: Place of each row among the requests, `[B]`.
        done: Whether it has ended, `[B]`.
    """

    cache: DynamicCache
    mask: torch.Tensor
    logits: torch.Tensor
    rows: torch.Tensor
    done: torch.Tensor

    def select(self, kept: torch.Tensor) -> torch.Tensor:
        """Keeps some rows only, and returns which."""
        self.cache.batch_select_indices(kept)
        self.mask, self.rows, self.done = self.mask[kept], self.rows[kept], self.done[kept]
        return kept


class _Record:
    """Collects what was sampled on the device, and reads it back once."""

    def __init__(self, num_rows: int, max_new_tokens: int, device: torch.device) -> None:
        shape = (max_new_tokens, num_rows)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.entropy = torch.zeros(shape, device=device)
        self.num_steps = 0

    def write(
        self,
        step: int,
        rows_B: torch.Tensor,
        tokens_B: torch.Tensor,
        logprobs_B: torch.Tensor,
        entropy_B: torch.Tensor,
    ) -> None:
        self.ids[step, rows_B] = tokens_B
        self.logprobs[step, rows_B] = logprobs_B
        self.entropy[step, rows_B] = entropy_B
        self.num_steps = step + 1

    def completions(self, end_ids: Sequence[int]) -> list[Completion]:
        ids, logprobs, entropy = (
            values[: self.num_steps].T.contiguous().cpu().numpy()
            for values in (self.ids, self.logprobs, self.entropy)
        )
        ended = np.isin(ids, end_ids)
        lengths = np.where(ended.any(-1), ended.argmax(-1) + 1, self.num_steps)
        return [
            Completion(
                tuple(row_ids[:n].tolist()), row_logprobs[:n], row_entropy[:n], truncated=not row_ended.any()
            )
            for row_ids, row_logprobs, row_entropy, n, row_ended in zip(
                ids, logprobs, entropy, lengths, ended, strict=True
            )
        ]
