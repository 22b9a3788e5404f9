"""What a training step's replies amount to, slot by slot, under the names of the run file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from gradscope.train.batch import Sample


def slot_metrics(samples: Sequence[Sample], slots: Iterable[str]) -> dict[str, dict[str, float]]:
    """Returns metric to slot to value; a slot without replies has none, a value that means nothing is NaN."""
    by_slot = {slot: [sample for sample in samples if sample.row.slot == slot] for slot in slots}
    return {
        name: {slot: measure(mine) for slot, mine in by_slot.items() if mine}
        for name, measure in MEASURES.items()
    }


def mean(values: Iterable[float]) -> float:
    """Returns the mean of the values that are not NaN; NaN when there are none."""
    present = [value for value in values if not math.isnan(value)]
    return float(np.mean(present)) if present else math.nan


def _spread(values: Iterable[float]) -> float:
    """Returns the standard deviation (ddof 1) of the values that are not NaN; NaN for fewer than two."""
    present = [value for value in values if not math.isnan(value)]
    return float(np.std(present, ddof=1)) if len(present) > 1 else math.nan


def _entropy(samples: Sequence[Sample]) -> float:
    return mean(np.concatenate([sample.row.entropy for sample in samples]).tolist())


def _perplexity(samples: Sequence[Sample]) -> float:
    surprise = -mean(np.concatenate([sample.row.logprobs for sample in samples]).tolist())
    return math.exp(min(surprise, 700.0))


def _lengths(samples: Sequence[Sample]) -> list[int]:
    return [len(sample.row.completion_ids) for sample in samples]


MEASURES: Mapping[str, Callable[[Sequence[Sample]], float]] = {
    "reward_mean": lambda samples: mean(sample.reward for sample in samples),
    "reward_std": lambda samples: _spread(sample.reward for sample in samples),
    "advantage_abs_mean": lambda samples: mean(abs(sample.advantage) for sample in samples),
    "zero_advantage_fraction": lambda samples: mean(
        math.nan if math.isnan(sample.advantage) else float(sample.advantage == 0) for sample in samples
    ),
    "accuracy": lambda samples: mean(sample.row.own for sample in samples),
    "response_tokens_mean": lambda samples: mean(map(float, _lengths(samples))),
    "response_tokens_p95": lambda samples: float(np.percentile(_lengths(samples), 95)),
    "truncated_fraction": lambda samples: mean(float(sample.row.truncated) for sample in samples),
    "fallback_fraction": lambda samples: mean(float(sample.row.mark.fallback) for sample in samples),
    "violation_fraction": lambda samples: mean(float(not sample.row.in_format) for sample in samples),
    "copy_fraction": lambda samples: mean(
        math.nan if sample.row.mark.copied is None else float(sample.row.mark.copied) for sample in samples
    ),
    "entropy": _entropy,
    "perplexity": _perplexity,
    "num_tokens": lambda samples: float(sum(_lengths(samples))),
    "num_rows": lambda samples: float(len(samples)),
}
