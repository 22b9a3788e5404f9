"""Prints how often detectors and warner speak on simulated runs: of each kind, with and without a fault.

Every rate that sentences of the detectors and docs/detectors.md quote is one of these:
`python tests/benchmarks/false_alarms.py --runs 400`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gradscope import derive, find_amplification, find_capture, synthetic
from gradscope.detectors.cliff import FOUND, MARGIN, POSSIBLE, STRONG
from gradscope.stats.two_window import fall_p_value, strongest_fall
from gradscope.synthetic.gradients import wander
from gradscope.warner import replay

WORKFLOWS = (
    {"generator": 3, "aggregator": 1},
    {"orchestrator": 1, "worker": 3, "synthesizer": 1},
    {"generator": 3, "evaluator": 3},
)
LENGTHS = (20, 30, 50, 100)
"""Evaluations of a curve."""
TOTALS = (30, 100, 300, 1400)
"""Problems of an evaluation."""
JITTERS = (0.0, 0.005, 0.01)
"""Standard deviation of the checkpoints' true accuracy."""
STEPS = (60, 100, 200, 400)
WANDERS = (0.0, 0.5, 1.0)
"""Slow wander of both of the warner's values, as a multiple of the noise of a step."""
WANDER_MEMORY = 0.97
WARNED_STEPS = 600

Table = dict[str, list[float]]
"""Row name to shares."""


def cliff_scores(num_runs: int, generator: np.random.Generator) -> Iterator[tuple[str, int, float]]:
    """Yields kind, problems an evaluation and score of simulated curves, `num_runs` of each kind."""
    for run in range(num_runs):
        for kind in (*synthetic.FALLING, *synthetic.STEADY):
            length, num_total = int(generator.choice(LENGTHS)), TOTALS[run % len(TOTALS)]
            curve = synthetic.accuracy_curve(
                kind,
                length=length,
                num_total=num_total,
                generator=generator,
                jitter=float(generator.choice(JITTERS)),
            )
            total = np.full(length, float(num_total))
            fall = strongest_fall(curve.num_correct.astype(np.float64), total, margin=MARGIN)
            yield kind, num_total, float(fall.score)


def cliffs(num_runs: int, generator: np.random.Generator) -> Table:
    """Returns the shares of curves above each threshold, by kind and by problems an evaluation."""
    rows = list(cliff_scores(num_runs, generator))
    table: Table = {}
    for kind in (*synthetic.FALLING, *synthetic.STEADY):
        table[kind] = above([score for own, _, score in rows if own == kind])
    for title, kinds in (("all with a cliff", synthetic.FALLING), ("all without", synthetic.STEADY)):
        for num_total in (*TOTALS, None):
            scores = [s for own, num, s in rows if own in kinds and num_total in (num, None)]
            name = title if num_total is None else f"{title}, {num_total} problems"
            table[name] = above(scores)
    return table


def above(scores: Sequence[float]) -> list[float]:
    """Returns the shares of scores above the cliff detector's three thresholds."""
    return [float(np.mean(np.array(scores) > threshold)) for threshold in (POSSIBLE, FOUND, STRONG)]


def p_values(num_runs: int, generator: np.random.Generator) -> Table:
    """Returns how often the cliff's p-value is small on curves that never fall."""
    table: Table = {}
    for kind in ("flat", "plateau", "slow_rise"):
        values = []
        for _ in range(num_runs):
            if kind == "flat":
                correct = generator.binomial(200, 0.6, size=25)
            else:
                curve = synthetic.accuracy_curve(kind, length=25, num_total=200, generator=generator)
                correct = curve.num_correct
            values.append(fall_p_value(correct.astype(np.float64), np.full(25, 200.0), num_replicates=199))
        table[kind] = [float(np.mean(np.array(values) <= level)) for level in (0.05, 0.1)]
    return table


def captures(num_runs: int, generator: np.random.Generator) -> Table:
    """Returns the shares of verdicts of the capture detector, by kind of run."""
    verdicts: dict[str, list[str]] = {kind: [] for kind in ("capture", *synthetic.HARMLESS)}
    for run in range(num_runs):
        roles = WORKFLOWS[run % len(WORKFLOWS)]
        membership = np.repeat(np.eye(len(roles)), list(roles.values()), axis=0)
        copies = membership.sum(axis=0)
        for kind, seen in verdicts.items():
            num_steps = int(generator.choice(STEPS))
            series = synthetic.gradient_series(kind, roles=roles, num_steps=num_steps, generator=generator)
            tokens, violation = (each @ membership / copies for each in (series.tokens, series.violation))
            seen.append(find_capture(derive.role_gram(series.gram, membership), tokens, violation).verdict)
    return shares(verdicts, ("capture", "dominance", "possible"))


def amplifications(num_runs: int, generator: np.random.Generator) -> Table:
    """Returns the shares of verdicts of the amplification detector on one role's copies, by kind of run."""
    verdicts: dict[str, list[str]] = {kind: [] for kind in ("amplification", *synthetic.HARMLESS, "capture")}
    for _ in range(num_runs):
        for kind, seen in verdicts.items():
            num_steps = int(generator.choice(STEPS))
            series = synthetic.gradient_series(
                kind, roles=WORKFLOWS[0], num_steps=num_steps, generator=generator
            )
            seen.append(find_amplification(series.gram[:, :3, :3]).verdict)
    return shares(verdicts, ("amplification", "possible"))


def shares(verdicts: Mapping[str, Sequence[str]], words: Sequence[str]) -> Table:
    """Returns the share of each verdict by kind, the first kind being the fault; then over all others."""
    table = {kind: [float(np.mean([each == word for each in seen])) for word in words]
             for kind, seen in verdicts.items()}  # fmt: skip
    table["all without"] = np.mean(list(table.values())[1:], axis=0).tolist()
    return table


def warnings(num_runs: int, generator: np.random.Generator) -> Table:
    """Returns the share of runs in which nothing happens that are warned of at least once."""
    table: Table = {}
    for scale in WANDERS:
        warned = []
        for _ in range(num_runs):
            series = generator.standard_normal((2, WARNED_STEPS))
            for values in series:
                values += wander(WARNED_STEPS, scale=scale, memory=WANDER_MEMORY, generator=generator)
            warned.append(bool(replay(0.2 * series[0] - 1.0, 0.1 * series[1] + 0.2).any()))
        name = "independent steps" if not scale else f"wander of {scale:g} times the noise of a step"
        table[name] = [float(np.mean(warned))]
    return table


def show(title: str, columns: Sequence[str], table: Table) -> None:
    """Prints a table in the notation of Markdown, shares in per cent."""
    print(f"\n{title}\n\n| runs | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, values in table.items():
        print(f"| {name} | {' | '.join(f'{100 * value:.1f} %' for value in values)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="simulated runs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"{options.runs} runs of each kind, seed {options.seed}.")
    parts = [
        ("Cliff: score above", ("1.5 (possible)", "2 (cliff)", "3 (strong)"), cliffs),
        ("Cliff: p-value on curves that never fall", ("p <= 0.05", "p <= 0.1"), p_values),
        ("Capture: verdict", ("capture", "dominance", "possible"), captures),
        ("Amplification: verdict", ("amplification", "possible"), amplifications),
        (f"Warner: warned within {WARNED_STEPS} steps in which nothing happens", ("warned",), warnings),
    ]
    for place, (title, columns, measure) in enumerate(parts):
        generator = np.random.default_rng([options.seed, place])
        show(title, columns, measure(options.runs, generator))


if __name__ == "__main__":
    main()
