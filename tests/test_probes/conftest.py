"""A two-layer Qwen3 and a small network in float64, rows of slots, and the slow way to a slot's gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradscope import probes

SLOTS = {
    "generator/0": "generator",
    "generator/1": "generator",
    "generator/2": "generator",
    "aggregator/0": "aggregator",
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = 19
EXACT = 1e-12
"""Largest relative error of double precision."""


@dataclass
class Batch:
    """Padded rows `[N, S]` with their slots and a weight for each token's log-probability."""

    ids: torch.Tensor
    attention: torch.Tensor
    weights: torch.Tensor
    slots: list[str]

    def take(self, rows: Sequence[int]) -> Batch:
        rows = list(rows)
        return Batch(
            self.ids[rows], self.attention[rows], self.weights[rows], [self.slots[row] for row in rows]
        )

    def of(self, slot: str) -> Batch:
        return self.take([row for row, name in enumerate(self.slots) if name == slot])


class Nano:
    """What the tests build their cases from."""

    slots = SLOTS

    def model(self, *, dtype: torch.dtype = torch.float64, **config: object) -> Qwen3ForCausalLM:
        torch.manual_seed(0)
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
        } | config
        return Qwen3ForCausalLM(Qwen3Config(**settings)).to(dtype)

    def lora(
        self,
        *,
        adapters: Sequence[str] = ("default",),
        dtype: torch.dtype = torch.float64,
        model: nn.Module | None = None,
        **config: object,
    ) -> nn.Module:
        torch.manual_seed(1)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR)} | config
        base = self.model(dtype=dtype) if model is None else model
        with warnings.catch_warnings():
            # PEFT asks transformers for an attribute by its former name.
            warnings.simplefilter("ignore", FutureWarning)
            peft = get_peft_model(base, LoraConfig(**settings), adapter_name=adapters[0])
        for name in adapters[1:]:
            peft.add_adapter(name, LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_B" in name or "lora_embedding_A" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        return peft.to(dtype)

    def checkpoint(self, model: nn.Module, *, reentrant: bool) -> None:
        """Turns activation checkpointing on, under its name in transformers 5.0 or the later one."""
        model.train()
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": reentrant})

    def batch(self, slots: Sequence[str], *, length: int = 7, seed: int = 0, pad: str = "right") -> Batch:
        generator = torch.Generator().manual_seed(seed)
        num_rows = len(slots)
        ids = torch.randint(1, VOCABULARY, (num_rows, length), generator=generator)
        lengths = torch.randint(length // 2 + 1, length + 1, (num_rows,), generator=generator)
        attention = (torch.arange(length) < lengths[:, None]).long()
        if pad == "left":
            attention = attention.flip(1)
        weights = torch.randn(num_rows, length - 1, generator=generator, dtype=torch.float64)
        return Batch(ids, attention, weights * attention[:, 1:] * attention[:, :-1], list(slots))

    def shuffled(self, rows_per_slot: Sequence[int], **options: object) -> Batch:
        slots = [slot for slot, number in zip(SLOTS, rows_per_slot, strict=True) for _ in range(number)]
        order = np.random.default_rng(3).permutation(len(slots))
        return self.batch([slots[row] for row in order], **options)

    def row_losses(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
        return -(logprobs * batch.weights.to(logprobs.dtype)).sum(1)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.row_losses(model, batch).sum()

    def separate(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        loss: Callable[[Batch], torch.Tensor] | None = None,
        slots: Sequence[str] = tuple(SLOTS),
    ) -> dict[str, dict[str, torch.Tensor]]:
        """One forward and backward of each slot's rows alone, for each micro-batch."""
        found = {}
        for slot in slots:
            model.zero_grad(set_to_none=True)
            for batch in batches:
                if slot in batch.slots:
                    (loss or (lambda part: self.loss(model, part)))(batch.of(slot)).backward()
            found[slot] = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
                if p.requires_grad or p.grad is not None
            }
        model.zero_grad(set_to_none=True)
        return found

    def gram(self, gradients: dict[str, dict[str, torch.Tensor]]) -> np.ndarray:
        flat = torch.stack([torch.cat([g.flatten() for g in parts.values()]) for parts in gradients.values()])
        return (flat.double() @ flat.double().T).cpu().numpy()

    def gram_error(self, found: np.ndarray, expected: np.ndarray) -> float:
        """Worst entry error over the product of the two norms."""
        norms = np.sqrt(np.diag(expected))
        return float(np.max(np.abs(found - expected) / np.outer(norms, norms)))

    def gradient_error(
        self, found: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]
    ) -> float:
        """Worst relative error over slots and parameters."""
        worst = 0.0
        for slot, parts in expected.items():
            for name, gradient in parts.items():
                size = float(gradient.norm())
                gap = float((found[slot][name] - gradient).norm())
                worst = max(worst, gap / size if size else gap)
        return worst

    def check(self, model, batches, *, policies=None, run=None, expected=None):
        """Runs micro-batches with a probe and compares every slot's gradient and the Gram matrix."""
        expected = expected or self.separate(model, batches)
        with probes.attach(model, self.slots, policies) as scope:
            if run is None:
                for batch in batches:
                    with scope.rows(batch.slots):
                        loss = self.loss(model, batch)
                    loss.backward()
            else:
                run(scope)
            found = {slot: scope.slot_gradients(slot) for slot in self.slots}
            record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
        assert self.gradient_error(found, expected) <= EXACT
        assert self.gram_error(record.gram, self.gram(expected)) <= EXACT
        assert max(scope.residuals.values()) <= EXACT
        return record


PAIR = {"solver/0": "solver", "judge/0": "judge"}


class Scale(nn.Module):
    """A layer of a kind that row segmentation does not know."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


class Toy:
    """A small network in a plain loop, two slots of two roles."""

    slots = PAIR

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()

    def unknown_layer(self):
        return Scale()

    def data(self, rows=6):
        generator = torch.Generator().manual_seed(1)
        return (
            torch.randn(rows, 3, generator=generator, dtype=torch.float64),
            torch.randn(rows, 1, generator=generator, dtype=torch.float64),
        )

    def sgd(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def run(self, scope, model, slots, **details):
        x, y = self.data(len(slots))
        with scope.rows(slots, **details):
            loss = ((model(x) - y) ** 2).sum()
        loss.backward()
        return loss


@pytest.fixture(scope="session")
def nano() -> Nano:
    torch.set_num_threads(1)
    return Nano()


@pytest.fixture
def toy() -> Toy:
    return Toy()
