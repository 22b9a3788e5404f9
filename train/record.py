"""Writes what was said: sampled episodes as compressed JSON lines, and their rows for the run file."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradscope.runfile import RunWriter
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
        self, step: int, episodes: Sequence[Episode], samples: Iterable[Sample], writer: RunWriter
    ) -> None:
        """Records some episodes of a step, when it is one to be recorded and there is room."""
        every = self.section.episodes_every
        if not every or (step - 1) % every or self._size() >= self.section.episodes_max_megabytes * 1e6:
            return
        chosen = spread(episodes, self.section.episodes_per_step)
        by_id = {sample.row.id: sample for sample in samples}
        lines = [json.dumps(self._episode(step, episode, by_id)) for episode in chosen]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:06d}.jsonl.gz"
        # No time stamp inside, so that equal runs write equal bytes.
        path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
        rows = [(episode, row) for episode in chosen for row in episode.rows]
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


def _number(value: float) -> float | None:
    """Returns None for NaN, which JSON has no word for."""
    return None if math.isnan(value) else value
