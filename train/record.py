"""Writes what was said: sampled episodes as compressed JSON lines, and their rows for the run file."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.runfile import RunWriter
from gradscope.runfile.evidence import RowEvidence
from gradscope.runfile.update import UpdateRecord
from gradscope.train.batch import Sample
from gradscope.train.config.sections import RunSection
from gradscope.train.rollout import Episode, Row
from gradscope.train.rollout.chat import Chat

FOLDER = "episodes"


class EpisodeRecorder:
    """Keeps a few episodes of some steps, up to a size.

    Args:
        run: Run directory.
        chat: Reads prompts back into text.
        section: How many, how often, how much.
    """

    def __init__(self, run: Path, chat: Chat, section: RunSection) -> None:
        self.folder = run / FOLDER
        self.chat = chat
        self.section = section

    def record(
        self,
        step: int,
        episodes: Sequence[Episode],
        samples: Iterable[Sample],
        writer: RunWriter,
        *,
        measured: Sequence[RowEvidence] = (),
        num_top: int = 0,
    ) -> None:
        """Records some episodes of a step, when it is one to be recorded and there is room.

        Args:
            step: The step.
            episodes: All its episodes.
            samples: Their replies.
            writer: Gets the rows of what is recorded, but for those it has already.
            measured: Rows of the step's updates that were measured one by one, and are in the run file.
            num_top: How many of each update, those of the largest gradients, are recorded in any case.
        """
        top = {row_id for rows in measured for row_id in largest_rows(rows, num_top)}
        every = self.section.episodes_every
        due = every > 0 and (step - 1) % every == 0
        regular = spread(episodes, self.section.episodes_per_step) if due else []
        kept = {episode.id for episode in regular}
        kept.update(e.id for e in episodes if not top.isdisjoint(row.id for row in e.rows))
        chosen = [episode for episode in spread(episodes, len(episodes)) if episode.id in kept]
        if not chosen or self._size() >= self.section.episodes_max_megabytes * 1e6:
            return
        by_id = {sample.row.id: sample for sample in samples}
        lines = [json.dumps(self._episode(step, episode, by_id)) for episode in chosen]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:06d}.jsonl.gz"
        # No time stamp inside, so that equal runs write equal bytes.
        path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
        known = {row_id for found in measured for row_id in found.row_ids}
        rows = [(episode, row) for episode in chosen for row in episode.rows if row.id not in known]
        writer.append_rows(
            step,
            row_id=[row.id for _, row in rows],
            slot=[row.slot for _, row in rows],
            problem=[episode.problem.id for episode, _ in rows],
            episode=[episode.id for episode, _ in rows],
            advantage=[by_id[row.id].advantage for _, row in rows],
            num_tokens=[len(row.completion_ids) for _, row in rows],
        )

    def forget_after(self, step: int) -> None:
        """Removes what was recorded of later steps, which a resumed run plays anew."""
        for path in self.folder.glob("step_*.jsonl.gz"):
            digits = path.name.removeprefix("step_").partition(".")[0]
            if digits.isdigit() and int(digits) > step:
                path.unlink()

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.jsonl.gz"))

    def _episode(self, step: int, episode: Episode, samples: dict[str, Sample]) -> dict[str, Any]:
        return {
            "episode": episode.id,
            "step": step,
            "problem": episode.problem.id,
            "question": episode.problem.question,
            "sample": episode.sample,
            "answer": episode.answer,
            "correct": episode.correct,
            "dropped": episode.dropped,
            "rows": [self._row(row, samples[row.id]) for row in episode.rows],
        }

    def _row(self, row: Row, sample: Sample) -> dict[str, Any]:
        return {
            "row_id": row.id,
            "slot": row.slot,
            "role": row.role,
            "turn": row.turn,
            "prompt": self.chat.tokenizer.decode(row.prompt_ids),
            "text": row.text,
            "reward": _number(sample.reward),
            "advantage": _number(sample.advantage),
            "own": _number(row.own),
            "in_format": row.in_format,
            "fallback": row.mark.fallback,
            "truncated": row.truncated,
            "num_prompt_tokens": len(row.prompt_ids),
            "num_tokens": len(row.completion_ids),
        }


def spread(episodes: Sequence[Episode], num: int) -> list[Episode]:
    """Returns up to `num` episodes, the first sample of each problem first, then the second, ..."""
    order = sorted(episodes, key=lambda episode: (episode.sample, episode.problem_index))
    return sorted(order[:num], key=lambda episode: (episode.problem_index, episode.sample))


def largest_rows(rows: RowEvidence, num: int) -> list[str]:
    """Returns the ids of up to `num` rows with the largest gradients."""
    order = np.argsort(-np.nan_to_num(rows.grad_norm), kind="stable")
    return [rows.row_ids[place] for place in order[:num]]


def name_rows(records: Iterable[UpdateRecord], episodes: Iterable[Episode]) -> None:
    """Gives measured rows the ids of their problems and episodes."""
    place_of = {row.id: episode for episode in episodes for row in episode.rows}
    for record in records:
        if record.rows is not None:
            own = [place_of[row_id] for row_id in record.rows.row_ids]
            record.rows = replace(
                record.rows,
                problems=tuple(episode.problem.id for episode in own),
                episodes=tuple(episode.id for episode in own),
            )


def _number(value: float) -> float | None:
    """Returns None for NaN, which JSON has no word for."""
    return None if math.isnan(value) else value
