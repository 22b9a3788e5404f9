"""Instruments TRL's `GRPOTrainer`: rows follow its generation buffer, shuffled, split and used again.

    trainer = instrument(trainer, slots={"solver/0": "solver", "judge/0": "judge"}, slot_of="role",
                         problem_of="problem", writer="runs/mine")

A callback sees neither columns nor the permutation. So each generation's examples are read where they are
generated for; their places go into the dictionary that TRL shuffles and splits, and come back with every
micro-batch, however often it is used.

Legend: B rows of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import trl
import trl.trainer.utils as trl_utils

from gradscope.errors import ProbeError
from gradscope.probes.attribution import Attribution
from gradscope.probes.evidence import Evidence
from gradscope.probes.integrations.examples import Column, Rows, RowSource, hashable
from gradscope.probes.integrations.grpo_loss import loss_weights
from gradscope.probes.integrations.processes import joined
from gradscope.probes.integrations.replies import Reply, mean_reward, reply_metrics
from gradscope.probes.integrations.session import Plan
from gradscope.probes.integrations.tokens import TokenPass, rows_of, token_means
from gradscope.probes.integrations.transformers import MeasuredTrainer, probed
from gradscope.probes.integrations.trl_head import FUNCTION, tapped_head
from gradscope.probes.targets import Mode
from gradscope.runfile import RunWriter

PLACE = "gradscope_place"
"""Key under which TRL's batches carry the place of each row in its generation."""

READ = (
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
"""Methods of TRL, none of them public, in which rows are followed."""

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's losses with a clipped ratio."""

Target = TypeVar("Target")


def instrument(
    trainer: Target,
    *,
    slots: Mapping[str, str],
    slot_of: Column = "slot",
    writer: RunWriter | str | Path,
    problem_of: Column = lambda example: hashable(example["prompt"]),
    row_id_of: Column | None = None,
    policies: Mapping[str, str] | None = None,
    mode: Mode = "auto",
    attribution: Attribution | None = None,
    evidence: Evidence | None = None,
    accuracy: str = "reward",
) -> Target:
    """Returns the trainer with its class's training measured, or a class whose trainers are.

    The run file gets one step for each optimizer step: the update's record, the slots' rewards, lengths,
    entropy and divergences over the rows of that update, and TRL's own metrics at the steps that it logs.

    Args:
        trainer: A `trl.GRPOTrainer`, changed in place, or a subclass of it.
        slots: Slot -> role, in the order of every result.
        slot_of: Column of the training set with the slot of a row, or a function of the example.
        writer: A run directory, opened for each `train()` and resumed with it, or an open RunWriter.
        problem_of: Column or function that gives the problem of a row. Where several roles answer one problem
            with prompts of their own, name the problem; by default it is the prompt.
        row_id_of: Column or function that gives the name of a row; by default generation and place.
        policies: Role or slot -> policy; None sends all to the active adapter.
        mode: As for `probes.attach`.
        attribution: As for `probes.attach`.
        evidence: As for `probes.attach`.
        accuracy: Evaluation metric that is a fraction of right answers: `reward` where rewards are 0 or 1.

    Raises:
        ProbeError: No GRPOTrainer, one that is instrumented already, uses Liger's kernels or trains in a way
            that hides gradients; a column that is missing, or an unknown slot in it.
    """
    source = RowSource(slots=slots, slot_of=slot_of, problem_of=problem_of, row_id_of=row_id_of)
    plan = Plan(
        slots=slots,
        policies=policies,
        mode=mode,
        attribution=attribution,
        evidence=evidence,
        writer=writer,
    )
    return probed(trainer, MeasuredGRPO, source, plan, base=trl.GRPOTrainer, accuracy=accuracy)


@dataclass(frozen=True)
class Generation:
    """One generation of this process, in the order in which it was generated.

    Attributes:
        rows: Slots, problems and names.
        replies: The completions; None for those of no slot.
        num_tokens: Scored tokens of each.
        num_items: TRL's count of scored tokens in the generation, over all processes.
    """

    rows: Rows
    replies: list[Reply | None]
    num_tokens: list[int]
    num_items: float


class MeasuredGRPO(MeasuredTrainer):
    """Stands before the class of a GRPOTrainer."""

    gradscope_generation: Generation
    gradscope_rewards: torch.Tensor
    gradscope_replies: list[Reply]
    gradscope_pass: tuple[torch.Tensor, torch.Tensor | None]
    gradscope_passes: list[tuple[list[str | None], torch.Tensor]]
    gradscope_num_generations: int
    gradscope_num_sampled: int

    def gradscope_setup(self) -> None:
        """Checks the trainer, its data and TRL."""
        own = super(MeasuredTrainer, self)
        missing = [name for name in READ if not hasattr(own, name)]
        missing += [] if hasattr(trl_utils, FUNCTION) else [FUNCTION]
        if missing:
            raise ProbeError(
                f"instrument(): TRL {trl.__version__} has no {missing[0]}, which rows are followed by; use "
                "TRL 1.12 to 1.16."
            )
        super().gradscope_setup()
        self.gradscope_replies = []
        self.gradscope_passes = []
        self.gradscope_num_generations = self.gradscope_num_sampled = 0

    def get_train_dataloader(self) -> Any:
        """Returns TRL's own loader: its batches are the examples as they are."""
        return super(MeasuredTrainer, self).get_train_dataloader()

    def gradscope_micro_batch(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs TRL's own step: the rows are announced around its loss."""
        return self.gradscope_own_step(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        self.gradscope_rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        examples = [dict(example) for example in inputs]  # TRL may write into them
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.gradscope_num_sampled += len(examples) * self.accelerator.num_processes
        if self.model.training:
            self.gradscope_generation = self._gradscope_read(examples, output)
            output[PLACE] = torch.arange(len(examples))
        return output

    def _gradscope_read(self, examples: list[dict[str, Any]], output: Mapping[str, Any]) -> Generation:
        rows = self.gradscope_source.read(examples)
        if rows.row_ids is None:
            prefix = f"{self.accelerator.process_index}." if self.accelerator.num_processes > 1 else ""
            number = self.gradscope_num_generations
            rows = Rows(rows.slots, rows.problems, [f"{prefix}{number}.{at}" for at in range(len(examples))])
        self.gradscope_num_generations += 1
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        rewards = self.gradscope_rewards * self.reward_weights.to(self.gradscope_rewards.device)
        unknown = self.gradscope_rewards.isnan().all(1)
        own = slice(
            self.accelerator.process_index * len(examples),
            (self.accelerator.process_index + 1) * len(examples),
        )
        reward = rewards.nansum(1).masked_fill(unknown, math.nan)[own]
        numbers = torch.stack(
            [
                mask.sum(1).double(),
                output["advantages"].double(),
                reward.double(),
                self._gradscope_cut(output),
            ]
        ).tolist()  # one wait for the device in a generation
        replies = [
            None if slot is None else Reply(slot, int(tokens), advantage, value, bool(cut))
            for slot, tokens, advantage, value, cut in zip(rows.slots, *numbers, strict=True)
        ]
        items = float(output.get("num_items_in_batch", math.nan))
        return Generation(rows, replies, [int(tokens) for tokens in numbers[0]], items)

    def _gradscope_cut(self, output: Mapping[str, Any]) -> torch.Tensor:
        """Returns 1 for rows whose last token ends nothing, `[B]`."""
        ids, mask = output["completion_ids"], output["completion_mask"]
        last = ids.gather(1, (mask.sum(1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
        known = getattr(self, "eos_token_ids", None) or [
            self._tokenizer.eos_token_id
        ]  # several in later versions
        ends = torch.tensor([*known, self._tokenizer.pad_token_id], device=ids.device)
        return (~torch.isin(last, ends)).double()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        places = inputs.get(PLACE)
        if places is None:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
            return loss
        made, chosen = self.gradscope_generation, places.tolist()
        tokens = [made.num_tokens[place] for place in chosen]
        replies = [made.replies[place] for place in chosen]
        self.gradscope_replies += [reply for reply in replies if reply is not None]
        weights = loss_weights(
            tokens,
            loss_type=self.loss_type,
            num_passes=self.current_gradient_accumulation_steps * self.accelerator.num_processes,
            longest=self.max_completion_length,
            num_items=made.num_items
            * self.current_gradient_accumulation_steps
            / self.args.steps_per_generation,
        )
        session = self.gradscope_session
        rows = made.rows.take(chosen)
        with ExitStack() as stack:
            stack.enter_context(
                session.rows(
                    rows,
                    tokens=tokens,
                    advantages=[math.nan if reply is None else reply.advantage for reply in replies],
                    loss_weights=weights,
                )
            )
            if session.scope is not None:
                stack.enter_context(tapped_head(session.scope, self.model, inputs))
            loss = super()._compute_loss(model, inputs)
        self.gradscope_passes.append((rows.slots, self._gradscope_tokens(inputs).sums()))
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if torch.is_grad_enabled():
            logprobs, entropy = found[:2]
            self.gradscope_pass = (logprobs.detach(), None if entropy is None else entropy.detach())
        return found

    def _gradscope_tokens(self, inputs: Mapping[str, Any]) -> TokenPass:
        logprobs, entropy = self.gradscope_pass
        clips = self.loss_type in CLIPPED and self.importance_sampling_level == "token"
        return TokenPass(
            logprobs,
            inputs["completion_mask"] * inputs.get("tool_mask", 1),
            inputs["advantages"],
            entropy=entropy,
            reference=inputs.get("ref_per_token_logps"),
            old=inputs.get("old_per_token_logps"),
            clip=(self.epsilon_low, self.epsilon_high) if clips else None,
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates, and remembers on how many completions: several for a problem."""
        before = self.gradscope_num_sampled
        output = super().evaluation_loop(*args, **kwargs)
        num_sampled = self.gradscope_num_sampled - before
        self.gradscope_evaluated = dict.fromkeys(self.gradscope_evaluated, num_sampled)
        return output

    def gradscope_metrics(self) -> dict[str, Any]:
        """Returns what is known of the step that has just been taken, and forgets it."""
        own, self.gradscope_replies = self.gradscope_replies, []
        passes, self.gradscope_passes = self.gradscope_passes, []
        slots = [slot for of_pass, _ in passes for slot in of_pass]
        replies = joined(own)
        tokens = joined(rows_of(slots, [sums for _, sums in passes]))
        return {
            **super().gradscope_metrics(),
            **reply_metrics(replies),
            **token_means(tokens),
            "episode_reward_mean": mean_reward(replies),
        }
