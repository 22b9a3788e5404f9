"""Measures a model on all workflows and generated tasks: `python -m gradscope.train.assets.measure DIR`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gradscope.train.assets.experts import EXPERTS
from gradscope.train.assets.model import TINY
from gradscope.train.assets.sampler import sample
from gradscope.train.episode import Call, Outcome, Play, Problem, Task, Workflow
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS

GROUP_SIZE = 8
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Measurement:
    """What one workflow does on one task's held-out problems; all but the names are fractions.

    Attributes:
        workflow: Its registered name.
        task: Its registered name.
        sampled: Accuracy at the sampling temperature.
        greedy: Accuracy at temperature 0.
        mixed_groups: Problems whose 8 sampled episodes are neither all right nor all wrong.
        fallback: Sampled replies that needed a fallback.
        violation: Sampled replies that are not in their role's format.
    """

    workflow: str
    task: str
    sampled: float
    greedy: float
    mixed_groups: float
    fallback: float
    violation: float


def play_all(
    workflow: Workflow,
    problems: Sequence[Problem],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    temperature: float,
    generator: torch.Generator,
) -> list[Outcome]:
    """Plays one episode on each problem, all side by side, and returns their outcomes in order."""
    outcomes: dict[int, Outcome] = {}
    live: dict[int, tuple[Play, list[Call]]] = {}
    for number, problem in enumerate(problems):
        play = workflow.play(problem)
        live[number] = (play, next(play))
    while live:
        prompts = [call.messages for _, calls in live.values() for call in calls]
        replies = iter(
            sample(
                model,
                tokenizer,
                prompts,
                temperature=temperature,
                max_new_tokens=MAX_NEW_TOKENS,
                generator=generator,
            )
        )
        waiting, live = live, {}
        for number, (play, calls) in waiting.items():
            try:
                live[number] = (play, play.send([next(replies) for _ in calls]))
            except StopIteration as end:
                outcomes[number] = end.value
    return [outcomes[number] for number in range(len(problems))]


def measure(
    workflow_name: str,
    task_name: str,
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_problems: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> Measurement:
    """Returns accuracies on the first held-out problems, 8 sampled episodes and one greedy one for each."""
    workflow = WORKFLOWS.get(workflow_name)(style="compact")
    problems = [task.problem("held_out", index) for index in range(num_problems)]
    generator = torch.Generator().manual_seed(seed)
    repeated = [problem for problem in problems for _ in range(GROUP_SIZE)]
    outcomes = play_all(workflow, repeated, model, tokenizer, temperature=temperature, generator=generator)
    right = _grades(task, repeated, outcomes).view(num_problems, GROUP_SIZE)
    greedy = play_all(workflow, problems, model, tokenizer, temperature=0.0, generator=generator)
    marks = [mark for outcome in outcomes for mark in outcome.marks]
    in_format = [
        task.in_format(mark.solution or "") if mark.in_format is None else mark.in_format for mark in marks
    ]
    return Measurement(
        workflow=workflow_name,
        task=task_name,
        sampled=right.mean().item(),
        greedy=_grades(task, problems, greedy).mean().item(),
        mixed_groups=((right.mean(1) > 0) & (right.mean(1) < 1)).double().mean().item(),
        fallback=sum(mark.fallback for mark in marks) / len(marks),
        violation=1 - sum(in_format) / len(marks),
    )


def measure_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, num_problems: int
) -> list[Measurement]:
    """Returns the measurement of every workflow on every generated task at their default difficulty."""
    return [
        measure(workflow, task, TASKS.get(task)(), model, tokenizer, num_problems=num_problems)
        for task in EXPERTS
        for workflow in WORKFLOWS.names()
    ]


def table(measurements: Sequence[Measurement]) -> str:
    """Returns the measurements as text, one line each."""
    lines = [
        f"{'workflow':<14}{'task':<12}{'sampled':>8}{'greedy':>8}{'mixed':>8}{'fallback':>9}{'violation':>10}"
    ]
    lines += [
        f"{m.workflow:<14}{m.task:<12}{m.sampled:>8.3f}{m.greedy:>8.3f}{m.mixed_groups:>8.3f}"
        f"{m.fallback:>9.3f}{m.violation:>10.3f}"
        for m in measurements
    ]
    return "\n".join(lines)


def as_rows(measurements: Sequence[Measurement]) -> list[dict[str, str | float]]:
    """Returns the measurements for a JSON report, rounded to four places."""
    return [
        {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(m).items()}
        for m in measurements
    ]


def _grades(task: Task, problems: Sequence[Problem], outcomes: Sequence[Outcome]) -> torch.Tensor:
    return torch.tensor(
        [float(task.grade(p, o.answer or "")) for p, o in zip(problems, outcomes, strict=True)],
        dtype=torch.float64,
    )


def main() -> None:
    """Prints the table for a model folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", nargs="?", default=str(TINY), help="folder of the model")
    parser.add_argument("--num-problems", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(
        table(measure_all(model, AutoTokenizer.from_pretrained(folder), num_problems=arguments.num_problems))
    )


if __name__ == "__main__":
    main()
