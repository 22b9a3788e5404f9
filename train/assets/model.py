"""The configuration of the embedded model: a Qwen3 decoder of about 0.1M parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradscope.train.assets.tokenizer import build_tokenizer

TINY = Path(__file__).parent / "tiny"
"""The folder of the shipped model: config, weights, tokenizer and the report of its making."""


def build_model(*, seed: int) -> Qwen3ForCausalLM:
    """Returns the untrained model: 2 layers, width 64, 4 heads, feed-forward 192, tied embeddings."""
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
