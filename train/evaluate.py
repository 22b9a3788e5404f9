"""Held-out accuracy of the policies as they are, or of a checkpoint of a finished run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradscope.derive import wilson_interval
from gradscope.errors import DataError, RunFileError
from gradscope.train.checkpoint import find_checkpoint, load_checkpoint
from gradscope.train.config import Config, load_config
from gradscope.train.directory import CONFIG_FILE
from gradscope.train.metrics import mean
from gradscope.train.rollout import Episode, Stream
from gradscope.train.session import Session

SPLIT = "held_out"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        step: Training step after which it was taken.
        greedy: Whether the most probable token was always taken.
        temperature: Sampling temperature; NaN when greedy.
        num_correct: Episodes whose answer is right.
        num_total: Episodes, dropped ones included.
        num_dropped: Episodes given up because a prompt was too long; they count as wrong.
        role_accuracy: Role to the fraction of its own answers that are right; NaN where none can be graded.
        role_tokens_mean: Role to mean tokens of a reply.
    """

    step: int
    greedy: bool
    temperature: float
    num_correct: int
    num_total: int
    num_dropped: int
    role_accuracy: Mapping[str, float]
    role_tokens_mean: Mapping[str, float]

    @property
    def accuracy(self) -> float:
        """Fraction of right answers."""
        return self.num_correct / self.num_total

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        low, high = wilson_interval(self.num_correct, self.num_total)
        return float(low), float(high)

    @property
    def mode(self) -> str:
        """How tokens were chosen: `greedy` or `sampled`."""
        return "greedy" if self.greedy else "sampled"

    def as_row(self, dataset: str) -> dict[str, Any]:
        """Returns it as `RunWriter.append_evaluation` takes it, without the step."""
        return {
            "dataset": dataset,
            "num_correct": self.num_correct,
            "num_total": self.num_total,
            "temperature": self.temperature,
            "greedy": self.greedy,
            "role_accuracy": self.role_accuracy,
            "role_tokens_mean": self.role_tokens_mean,
        }

    def describe(self) -> str:
        """Returns the evaluation as people read it, with its interval."""
        low, high = self.interval
        dropped = f", {self.num_dropped} dropped" if self.num_dropped else ""
        return (
            f"held-out accuracy {self.accuracy:.3f} {self.mode} "
            f"({self.num_correct} of {self.num_total}, 95 % {low:.3f} to {high:.3f}{dropped})"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; NaN becomes None."""
        values = {**asdict(self), "accuracy": self.accuracy, "interval": list(self.interval)}
        return {key: _plain(value) for key, value in values.items()}


def evaluate_session(session: Session, *, step: int, num_problems: int | None = None) -> list[Evaluation]:
    """Evaluates the policies as they are on the first held-out problems, sampled and greedy as configured.

    Args:
        session: What to evaluate.
        step: Training step reached; sampling differs from step to step.
        num_problems: How many problems; `evaluate.num_problems` when not given.
    """
    section = session.config.evaluate
    return [
        _evaluate(session, step=step, num=num_problems or section.num_problems, greedy=greedy)
        for greedy, wanted in ((False, section.sampled), (True, section.greedy))
        if wanted
    ]


def _evaluate(session: Session, *, step: int, num: int, greedy: bool) -> Evaluation:
    total = session.task.num_problems(SPLIT)
    count = num if total is None else min(num, total)
    if count == 0:
        raise DataError(f"task '{session.config.task.name}' has no held-out problems. Set evaluate.every=0.")
    problems = [session.task.problem(SPLIT, index) for index in range(count)]
    stream = Stream(session.config.train.seed, "evaluate", step)
    episodes = session.play(problems, group_size=1, stream=stream, greedy=greedy)
    return Evaluation(
        step=step,
        greedy=greedy,
        temperature=math.nan if greedy else session.config.rollout.temperature,
        num_correct=sum(episode.correct for episode in episodes),
        num_total=len(episodes),
        num_dropped=sum(episode.dropped is not None for episode in episodes),
        role_accuracy=_by_role(session, episodes, "accuracy"),
        role_tokens_mean=_by_role(session, episodes, "tokens"),
    )


def _by_role(session: Session, episodes: list[Episode], what: str) -> dict[str, float]:
    values: dict[str, list[float]] = {role: [] for role in session.workflow.roles}
    for episode in episodes:
        for row in episode.rows:
            values[row.role].append(row.own if what == "accuracy" else float(len(row.completion_ids)))
    return {role: mean(found) for role, found in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def open_session(run: str | Path, *, checkpoint: str | int = "last") -> tuple[Session, int]:
    """Returns a session with the weights of a run's checkpoint, and that checkpoint's step.

    Args:
        run: Run directory.
        checkpoint: `last`, `best` or a step.

    Raises:
        RunFileError: There is no such run or checkpoint.
    """
    folder = Path(run)
    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        raise RunFileError(
            f"{folder}: holds no {CONFIG_FILE}, so no run of this trainer. Give a directory that "
            "'gradscope train --out' wrote."
        )
    found = find_checkpoint(folder, checkpoint)
    if found is None:
        raise RunFileError(f"{folder}: has no checkpoint yet. Go on with 'gradscope train ... --resume'.")
    # A run may have trained without evaluations; whoever asks for one wants both kinds.
    both = ["evaluate.sampled=true", "evaluate.greedy=true"]
    config: Config = load_config(config_file, ["probes.enabled=false", *both])
    session = Session(config)
    return session, load_checkpoint(found, session.policies, with_optimizers=False).step


def evaluate_run(
    run: str | Path, *, checkpoint: str | int = "last", num_problems: int | None = None
) -> list[Evaluation]:
    """Evaluates a checkpoint of a run, sampled and greedy.

    Raises:
        RunFileError: There is no such run or checkpoint.
    """
    session, step = open_session(run, checkpoint=checkpoint)
    return evaluate_session(session, step=step, num_problems=num_problems)
