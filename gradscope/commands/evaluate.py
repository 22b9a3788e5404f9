"""`gradscope evaluate`: held-out accuracy of a run's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="last|best|STEP", help="Which checkpoint.")
    ] = "last",
    num_problems: Annotated[
        int | None, typer.Option("--n", min=1, help="Held-out problems; by default as the run had it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure held-out accuracy, sampled and greedy, with 95 % Wilson intervals."""
    from gradscope.train.evaluate import evaluate_run

    evaluations = evaluate_run(run, checkpoint=checkpoint, num_problems=num_problems)
    if as_json:
        content = {"run": str(run), "evaluations": [item.to_json() for item in evaluations]}
        typer.echo(json.dumps(content, indent=2))
        return
    for item in evaluations:
        roles = ", ".join(f"{role} {value:.3f}" for role, value in item.role_accuracy.items())
        typer.echo(f"step {item.step}: {item.describe()}; right by themselves: {roles}")
