"""verl's update loops as they were recorded.

verl needs an older transformers than the other tests, so that its interface stands here: names, signatures
and keys of `FSDPEngineWithLMHead` (verl 0.9.1) and of `DataParallelPPOActor` (verl 0.7.0), with loops that
call them in the same order.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

SLOTS = ("solver/0", "solver/1", "judge/0")
PROMPT, RESPONSE, ROWS = 4, 5, 9
BUDGET = 20
"""Tokens of a micro-batch."""


def columns(seed):
    """Rows as verl pads them: prompts left, responses right; and the strings of `non_tensor_batch`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 19, (ROWS, PROMPT + RESPONSE), generator=generator)
    prompts = torch.randint(1, PROMPT + 1, (ROWS,), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (ROWS,), generator=generator)
    places = torch.arange(PROMPT + RESPONSE)
    mask = ((places >= PROMPT - prompts[:, None]) & (places < PROMPT + responses[:, None])).long()
    advantages = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:],
        "advantages": advantages * mask[:, PROMPT:],
        "token_level_scores": torch.rand(ROWS, RESPONSE, generator=generator, dtype=torch.float64),
        "old_log_probs": torch.full((ROWS, RESPONSE), -3.0, dtype=torch.float64),
    }
    order = np.random.default_rng(seed).permutation(ROWS)
    strings = {
        "agent": np.array([SLOTS[place % 3] for place in order], dtype=object),
        "uid": np.array([f"problem {place // 3}" for place in order], dtype=object),
    }
    return tensors, strings


def log_probs(module, micro_batch):
    """Log-probabilities of the responses `[B, RESPONSE]` from one padded pass."""
    logits = module(
        input_ids=micro_batch["input_ids"],
        attention_mask=micro_batch["attention_mask"],
        position_ids=micro_batch["position_ids"],
        use_cache=False,
    ).logits[:, -RESPONSE - 1 : -1]
    return torch.log_softmax(logits, -1).gather(2, micro_batch["responses"][..., None]).squeeze(2)


def packed_log_probs(module, ids, positions, mask, pad_size=0):
    """The same from one packed pass over the tokens that `mask` keeps, with padding behind them."""
    rolled = torch.roll(ids, -1)
    ids = torch.nn.functional.pad(ids, (0, pad_size))
    positions = torch.cat([positions, torch.arange(pad_size)])
    logits = module(
        input_ids=ids[None], attention_mask=None, position_ids=positions[None], use_cache=False
    ).logits
    scores = torch.log_softmax(logits[0, : len(rolled)], -1).gather(1, rolled[:, None]).squeeze(1)
    full = torch.zeros(mask.shape, dtype=scores.dtype).masked_scatter(mask.bool(), scores)
    return full[:, -RESPONSE - 1 : -1]


class Stack(list):
    """Stands for tensordict's NonTensorStack."""

    def tolist(self):
        return list(self)


def dynamic(lengths):
    """Rows in micro-batches of at most `BUDGET` tokens, long ones first."""
    found = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if found[-1] and sum(lengths[other] for other in found[-1]) + lengths[row] > BUDGET:
            found.append([])
        found[-1].append(row)
    return found


class RecordedEngine:
    """`FSDPEngineWithLMHead` of verl 0.9.1: the methods that its training calls, in their order."""

    def __init__(self, module):
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.engine_config = SimpleNamespace(use_fused_kernels=False)
        self.optimizer_config = SimpleNamespace(clip_grad=0.05)
        self.use_ulysses_sp = False
        self.scaler = None

    def _get_packed_pad_size(self, packed_length):
        return -packed_length % 8

    def optimizer_zero_grad(self):
        self.optimizer.zero_grad()

    def optimizer_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        self.optimizer.step()
        return norm.item()

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        lengths = data["attention_mask"].sum(1).tolist()
        losses = []
        for rows in dynamic(lengths):
            micro_batch = {
                key: Stack([value[row] for row in rows]) if isinstance(value, Stack) else value[rows]
                for key, value in data.items()
                if isinstance(value, Stack | torch.Tensor)
            } | {key: value for key, value in data.items() if isinstance(value, SimpleNamespace)}
            kept = micro_batch["attention_mask"].bool()
            for key in ("input_ids", "position_ids"):
                parts = [values[own] for values, own in zip(micro_batch[key], kept, strict=True)]
                micro_batch[key] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
            with torch.set_grad_enabled(not forward_only):
                loss, _ = self.forward_step(
                    micro_batch, loss_function=loss_function, forward_only=forward_only
                )
            if not forward_only:
                loss.backward()
            losses.append(loss.item())
        return {"loss": losses, "metrics": {}}

    def forward_step(self, micro_batch, loss_function, forward_only):
        ids, mask = micro_batch["input_ids"], micro_batch["attention_mask"]
        positions = micro_batch["position_ids"]
        if micro_batch["use_remove_padding"].data:
            pad_size = self._get_packed_pad_size(len(ids.values()))
            scores = packed_log_probs(self.module, ids.values(), positions.values(), mask, pad_size)
        else:
            padded = {
                key: torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask.bool(), value.values())
                for key, value in (("input_ids", ids), ("position_ids", positions))
            }
            scores = log_probs(self.module, {**micro_batch, **padded})
        return loss_function(scores, micro_batch), {}

    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs


class Recorded:
    """Builds engines and batches of the recorded kind, in float64."""

    tolerance = 1e-12

    def __init__(self, nano):
        self.nano = nano

    def engine(self):
        return RecordedEngine(self.nano.lora())

    def batch(self, seed, *, packed, is_last=True, only=None):
        tensors, strings = self.columns(seed, only)
        flags = {"use_remove_padding": packed, "update_lr_scheduler": is_last}
        return {
            **tensors,
            **{name: Stack(values) for name, values in strings.items()},
            **{name: SimpleNamespace(data=value) for name, value in flags.items()},
        }

    def columns(self, seed, only):
        """Rows of which only one slot's have an advantage, or all."""
        tensors, strings = columns(seed)
        if only is not None:
            tensors["advantages"] = tensors["advantages"] * torch.tensor(strings["agent"] == only)[:, None]
        return tensors, strings

    def loss(self, scores, data):
        return -(scores * data["advantages"] * data["response_mask"]).sum() / (ROWS * RESPONSE)

    def gradient(self, weights, **batch):
        engine = self.engine()
        with torch.no_grad():
            for parameter, value in zip(engine.module.parameters(), weights, strict=True):
                parameter.copy_(value)
        engine.forward_backward_batch(self.batch(**batch), self.loss)
        found = [p for p in engine.module.parameters() if p.requires_grad]
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in found]
        ).double()

    def gram(self, weights, **batch):
        flat = torch.stack([self.gradient(weights, only=slot, **batch) for slot in SLOTS])
        return (flat @ flat.T).numpy()


class DataProto:
    """verl's DataProto, as far as an actor uses it."""

    def __init__(self, batch, non_tensor_batch, meta_info):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    def select(self, batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy=False):
        tensors = {key: self.batch[key] for key in batch_keys}
        strings = {key: self.non_tensor_batch[key] for key in non_tensor_batch_keys}
        return type(self)(batch=tensors, non_tensor_batch=strings, meta_info=self.meta_info)

    def take(self, rows):
        tensors = {key: value[rows] for key, value in self.batch.items()}
        strings = {key: value[rows] for key, value in self.non_tensor_batch.items()}
        return DataProto(tensors, strings, self.meta_info)

    def split(self, size):
        return [self.take(list(range(ROWS))[start : start + size]) for start in range(0, ROWS, size)]


class DataParallelPPOActor:
    """The actor of verl 0.7.0: selects its columns, splits, and steps once for each mini-batch."""

    def __init__(self, module, *, use_remove_padding):
        self.actor_module = module
        self.actor_optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.use_remove_padding = use_remove_padding
        self.use_ulysses_sp = False
        self.scaler = None

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        mask = micro_batch["attention_mask"].bool()
        if not self.use_remove_padding:
            return None, log_probs(self.actor_module, micro_batch) / temperature
        ids, positions = micro_batch["input_ids"][mask], micro_batch["position_ids"][mask]
        return None, packed_log_probs(self.actor_module, ids, positions, mask) / temperature

    def _optimizer_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.actor_module.parameters(), max_norm=0.05)
        self.actor_optimizer.step()
        return norm

    def update_policy(self, data):
        keys = ["responses", "response_mask", "input_ids", "attention_mask", "position_ids", "advantages"]
        data = data.select(batch_keys=keys, non_tensor_batch_keys=[])
        for mini_batch in data.split(6):
            self.actor_optimizer.zero_grad()
            for rows in dynamic(mini_batch.batch["attention_mask"].sum(1).tolist()):
                micro_batch = mini_batch.take(rows)
                inputs = {**micro_batch.batch, **micro_batch.non_tensor_batch}
                _, scores = self._forward_micro_batch(inputs, temperature=1.0, calculate_entropy=False)
                (-(scores * inputs["advantages"] * inputs["response_mask"]).sum() / 30).backward()
            self._optimizer_step()
        self.actor_optimizer.zero_grad()
        return {}
