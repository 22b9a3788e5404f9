"""Makes the embedded base model: `python -m gradscope.train.assets.warm_start --out DIR --seed 0`."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM
from transformers.utils import logging

from gradscope.train.assets.demonstrations import Demonstration, Noise, demonstrations
from gradscope.train.assets.measure import as_rows, measure_all, table
from gradscope.train.assets.model import build_model
from gradscope.train.assets.sampler import render
from gradscope.train.assets.tokenizer import build_tokenizer

_POOL_BATCHES = 16
_CHECKPOINT_EVERY = 100
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the base is trained.

    Attributes:
        steps: Optimizer steps.
        batch_size: Demonstrations in a step.
        learning_rate: Peak, after `warm_up` steps, falling to a tenth by a cosine.
        warm_up: Steps of linear warm-up.
        difficulty: Hardest problems demonstrated, for each task; the tasks' defaults go beyond.
        spread: Lengths mixed, for each task.
        noise: How often demonstrations go wrong.
        workflow_weights: How often each workflow is played, in proportion.
    """

    steps: int = 3500
    batch_size: int = 128
    learning_rate: float = 3e-3
    warm_up: int = 50
    difficulty: dict[str, int] = field(default_factory=lambda: {"stack_code": 5, "arithmetic": 4})
    spread: dict[str, int] = field(default_factory=lambda: {"stack_code": 4, "arithmetic": 3})
    noise: Noise = field(default_factory=Noise)
    workflow_weights: dict[str, float] = field(
        default_factory=lambda: {"single": 1, "voting": 1, "eval_opt": 1, "orch_workers": 2}
    )

    def rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def encode(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> tuple[list[int], int]:
    """Returns the token ids of prompt, reply and end token, and how many of them are the prompt."""
    prompt = tokenizer(render(tokenizer, demonstration.messages), add_special_tokens=False)["input_ids"]
    reply = tokenizer(demonstration.reply, add_special_tokens=False)["input_ids"]
    return [*prompt, *reply, tokenizer.eos_token_id], len(prompt)


def batches(
    tokenizer: PreTrainedTokenizerBase, recipe: Recipe, *, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (ids [B, T], labels [B, T]) of similar lengths; labels outside replies are ignored."""
    stream = demonstrations(
        difficulty=recipe.difficulty,
        spread=recipe.spread,
        noise=recipe.noise,
        workflow_weights=recipe.workflow_weights,
        seed=seed,
    )
    random = Random(seed)
    while True:
        pool = [encode(tokenizer, d) for d in islice(stream, _POOL_BATCHES * recipe.batch_size)]
        pool.sort(key=lambda pair: len(pair[0]))
        starts = list(range(0, len(pool), recipe.batch_size))
        random.shuffle(starts)
        for start in starts:
            rows = pool[start : start + recipe.batch_size]
            width = max(len(ids) for ids, _ in rows)
            ids = torch.full((len(rows), width), tokenizer.pad_token_id)
            labels = torch.full((len(rows), width), _IGNORED)
            for k, (row, num_prompt) in enumerate(rows):
                ids[k, : len(row)] = torch.tensor(row)
                labels[k, num_prompt : len(row)] = torch.tensor(row[num_prompt:])
            yield ids, labels


def train(recipe: Recipe, *, seed: int, out: Path) -> Qwen3ForCausalLM:
    """Returns the trained model; progress is printed and a checkpoint written every 100 steps."""
    tokenizer = build_tokenizer()
    model = build_model(seed=seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    started = time.process_time()
    for step, (ids, labels) in enumerate(islice(batches(tokenizer, recipe, seed=seed), recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % _CHECKPOINT_EVERY == 0:
            model.save_pretrained(out)
            print(
                f"step {step + 1} loss {loss.item():.3f} cpu {time.process_time() - started:.0f} s",
                flush=True,
            )
    return model.eval()


def main() -> None:
    """Trains, measures and saves the model, its tokenizer and a report of how it was made."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--num-problems", type=int, default=100, help="held-out problems measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    recipe = Recipe(steps=arguments.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = train(recipe, seed=arguments.seed, out=arguments.out)
    tokenizer = build_tokenizer()
    measurements = measure_all(model, tokenizer, num_problems=arguments.num_problems)
    print(table(measurements))
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    report = {
        "seed": arguments.seed,
        "recipe": asdict(recipe),
        "num_problems": arguments.num_problems,
        "accuracy": as_rows(measurements),
    }
    (arguments.out / "warm_start.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
