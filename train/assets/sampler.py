"""A plain batched sampler for measuring the embedded model; training has its own engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from gradscope.train.assets.tokenizer import decode_reply
from gradscope.train.episode import Message

_MAX_ROWS = 1024


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Returns the prompt text that the chat template makes of a call's messages."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    *,
    temperature: float,
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[str]:
    """Returns one reply for each prompt, in order; temperature 0 is greedy."""
    texts = [render(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(texts)), key=lambda k: len(texts[k]))
    replies = [""] * len(texts)
    for start in range(0, len(order), _MAX_ROWS):
        rows = order[start : start + _MAX_ROWS]
        sampled = _sample_batch(
            model, tokenizer, [texts[k] for k in rows], temperature, max_new_tokens, generator
        )
        for k, ids in zip(rows, sampled.tolist(), strict=True):
            replies[k] = decode_reply(tokenizer, ids)
    return replies


@torch.inference_mode()
def _sample_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    temperature: float,
    max_new_tokens: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Returns sampled ids [rows, new tokens], end tokens after the end."""
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs, cache = batch["input_ids"], DynamicCache(config=model.config)
    done = torch.zeros(len(texts), dtype=torch.bool)
    columns: list[torch.Tensor] = []
    for _ in range(max_new_tokens):
        # The cache goes by position: its keyword is another one in older versions of transformers.
        logits = model(inputs, mask, positions, cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        token = token.masked_fill(done, tokenizer.eos_token_id)
        columns.append(token)
        done = done | (token == tokenizer.eos_token_id)
        if done.all():
            break
        inputs = token[:, None]
        mask = torch.cat([mask, torch.ones_like(inputs)], dim=1)
        positions = positions[:, -1:] + 1
    return torch.stack(columns, dim=1)
