"""Trains many cells over several seeds; prints accuracy before and after as a table.

Seeds are cheap on the embedded model and one seed says nothing, so claims about a cell come from here:
`python tests/benchmarks/cells.py --steps 100 --seeds 0 1 2 --out DIR`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from gradscope.train.assets.experts import EXPERTS
from gradscope.train.workflows import WORKFLOWS

POLICIES = ("shared", "isolated")


@dataclass(frozen=True)
class Result:
    """One run: its cell, seed, accuracies before and after, and CPU seconds; `error` where it crashed."""

    cell: str
    seed: int
    sampled_before: float = math.nan
    sampled_after: float = math.nan
    greedy_before: float = math.nan
    greedy_after: float = math.nan
    cpu_seconds: float = math.nan
    events: int = 0
    error: str = ""


def run_one(cell: str, seed: int, overrides: list[str], out: Path) -> Result:
    """Trains one cell with one seed into a folder of its own."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from gradscope import train

    started = time.process_time()
    events = 0

    def count(report: train.StepReport) -> None:
        nonlocal events
        events += len(report.events)

    try:
        config = train.load_config(cell, [*overrides, f"train.seed={seed}"])
        result = train.run(config, out=out / f"{cell}-seed{seed}", on_step=count)
    except Exception as error:  # a crash of one cell is a row of the table, not the end of the others
        return Result(cell, seed, error=f"{type(error).__name__}: {error}")
    sampled = [item.accuracy for item in result.evaluations if not item.greedy]
    greedy = [item.accuracy for item in result.evaluations if item.greedy]
    cpu = time.process_time() - started
    return Result(cell, seed, sampled[0], sampled[-1], greedy[0], greedy[-1], cpu, events)


def table(results: Iterable[Result], num_problems: int) -> str:
    """Returns a Markdown table: means over seeds, and an interval of the sampled rise over seeds.

    The interval is Student's t over the seeds' rises; each rise also carries the noise of its evaluations.
    """
    by_cell: dict[str, list[Result]] = {}
    for result in results:
        by_cell.setdefault(result.cell, []).append(result)
    lines = [
        f"Means over seeds; evaluations on {num_problems} held-out problems.",
        "",
        "| cell | seeds | sampled before | after | rise (95 % over seeds) | greedy before | after | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(by_cell):
        runs = [result for result in by_cell[cell] if not result.error]
        crashed = len(by_cell[cell]) - len(runs)
        if not runs:
            lines.append(f"| {cell} | {crashed} crashed | | | | | | |")
            continue
        rises = [run.sampled_after - run.sampled_before for run in runs]
        columns = [
            f"{len(runs)}" + (f", {crashed} crashed" if crashed else ""),
            f"{mean(run.sampled_before for run in runs):.3f}",
            f"{mean(run.sampled_after for run in runs):.3f}",
            f"{mean(rises):+.3f} ± {half_width(rises):.3f}",
            f"{mean(run.greedy_before for run in runs):.3f}",
            f"{mean(run.greedy_after for run in runs):.3f}",
            f"{mean(run.cpu_seconds for run in runs):.0f}",
        ]
        lines.append(f"| {cell} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    """Returns the arithmetic mean."""
    items = list(values)
    return sum(items) / len(items)


def half_width(values: list[float]) -> float:
    """Returns half the width of the 95 % t interval of the mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    from scipy import special

    centre = mean(values)
    variance = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    quantile = float(special.stdtrit(len(values) - 1, 0.975))
    return quantile * math.sqrt(variance / len(values))


def main() -> None:
    """Runs the cells that were asked for and prints the table; numbers of each run go to results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workflows", nargs="+", default=WORKFLOWS.names())
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--tasks", nargs="+", default=list(EXPERTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--num-problems", type=int, default=300, help="held-out problems of an evaluation")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="section.key=value for every run")
    arguments = parser.parse_args()
    overrides = [
        f"train.steps={arguments.steps}",
        f"evaluate.every={arguments.every}",
        f"evaluate.num_problems={arguments.num_problems}",
        *arguments.overrides,
    ]
    cells = ["-".join(parts) for parts in product(arguments.workflows, arguments.policies, arguments.tasks)]
    results = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        pending = [
            pool.submit(run_one, cell, seed, overrides, arguments.out)
            for cell, seed in product(cells, arguments.seeds)
        ]
        for future in as_completed(pending):
            results.append(future.result())
    results.sort(key=lambda result: (result.cell, result.seed))
    (arguments.out / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    for result in results:
        if result.error:
            print(f"{result.cell} seed {result.seed}: {result.error}")
    print(table(results, arguments.num_problems))


if __name__ == "__main__":
    main()
