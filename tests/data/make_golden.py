"""Writes the sample of the present schema version that every later version must read: `run-VERSION/`.

A sample is made once, when a version is new, and never again: what matters is that bytes of that time stay
readable. Run as `python tests/data/make_golden.py` after raising the version.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np

from gradscope import schema
from gradscope.runfile import RunWriter, UpdateRecord

FOLDER = Path(__file__).resolve().parent
SLOTS = {"generator/0": "generator", "generator/1": "generator", "judge/0": "judge"}
POLICIES = {"generator": "first", "judge": "second"}
LATE = "generator/2"
MODULES = ("layers.0.q", "layers.11.v")
STORED, STEPS, CHECKPOINT = 6, 9, 4
"""Steps 0 to 5 end up in the file, 6 to 8 in the journal; step 5 was written a second time after a resume."""


def value(table: str, name: str, row: int, *place: int) -> float:
    """Returns what the sample holds there: simple fractions, by which nothing is rounded."""
    seed = sum(ord(letter) * (at + 1) for at, letter in enumerate(f"{table}.{name}")) % 997
    return (seed + 17 * row + sum(5 * (at + 1) * own for at, own in enumerate(place))) / 16


def count(table: str, name: str, row: int, *place: int) -> int:
    """Returns a whole number in the same way."""
    return int(16 * value(table, name, row, *place))


def numbers(table: str, name: str, row: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of what the sample holds at a row."""
    variable = schema.TABLES[table].variable(name)
    dtype = "f8" if variable is None else variable.dtype
    make = count if dtype.startswith("i") else value
    values = np.array([make(table, name, row, *place) for place in np.ndindex(*shape)]).reshape(shape)
    return values % 2 if dtype == "i1" else values


def record(step: int, names: tuple[str, ...]) -> UpdateRecord:
    """Returns the update of a step: every number that an update has."""
    num, table = len(names), schema.TABLES["updates"]
    own = [
        v for v in table.variables if not v.required and v.name not in ("minibatch", "attribution_residual")
    ]
    roles = len(dict.fromkeys(name.split("/")[0] for name in names))
    return UpdateRecord(
        "first",
        names,
        numbers("updates", "gram", step, (num, num)),
        counts={
            v.name: numbers("updates", v.name, step, (num,)) for v in own if v.dims == ("update", "slot")
        },
        scalars={v.name: float(numbers("updates", v.name, step, ())) for v in own if v.dims == ("update",)},
        gram_cross=numbers("updates", "gram_cross", step, (num, num)),
        update_gram=numbers("updates", "update_gram", step, (roles + 2, roles + 2)),
        effect=numbers("updates", "effect", step, (roles, roles + 2)),
        attribution_residual=value("updates", "attribution_residual", step),
    )


def append(writer: RunWriter, step: int) -> None:
    """Writes one step with everything that the schema knows, but NaN for the loss of step 2."""
    names = (*SLOTS, LATE) if step >= STORED else tuple(SLOTS)
    metrics: dict[str, object] = {
        "seconds": {"rollout": value("train", "seconds", step, 0)},
        "own": step * 1.5,
    }
    for variable in schema.TABLES["train"].variables:
        if variable.dims == ("step",) and variable.name not in (
            "step",
            "segment",
            "num_updates",
            "wall_time",
        ):
            metrics[variable.name] = float(numbers("train", variable.name, step, ()))
        elif variable.dims == ("step", "slot"):
            values = numbers("train", variable.name, step, (len(names),))
            metrics[variable.name] = dict(zip(names, values.tolist(), strict=True))
    if step == 2:
        metrics["loss"] = np.nan
    writer.append(step, record(step, names), metrics=metrics)
    shapes = {"grad_norm": (3, 2), "gram": (2, 3, 3), "change_gram": (2, 3, 3)}
    arrays = {name: numbers("modules", name, step, shape) for name, shape in shapes.items()}
    writer.append_modules(step, slots=tuple(SLOTS), modules=MODULES, **arrays)
    writer.append_rows(
        step,
        row_id=[f"r{step}"],
        slot=["judge/0"],
        problem=[f"p{step}"],
        episode=[f"e{step}"],
        grad_norm=[value("rows", "grad_norm", step)],
        advantage=[-value("rows", "advantage", step)],
        num_tokens=[count("rows", "num_tokens", step)],
        update=step,
        sketch=[numbers("rows", "sketch", step, (4,))],
    )
    if step % 2 == 0:
        roles = {"generator": value("eval", "role_accuracy", step, 0)}
        writer.append_evaluation(
            step, num_correct=step, num_total=16, dataset="held_out", temperature=0.5, greedy=step == 4,
            role_accuracy=roles, role_tokens_mean=roles,
        )  # fmt: skip
        writer.append_event(step, "checkpoint", f"Schritt {step}: gespeichert")


def make(folder: Path) -> None:
    """Writes the sample: a file, a superseded step, a journal behind it in which a slot turns up."""
    shutil.rmtree(folder, ignore_errors=True)
    live = folder.with_name(f"{folder.name}.live")
    options = {"slots": SLOTS, "policies": POLICIES, "config": {"workflow": {"name": "golden"}}, "seed": 7}
    with RunWriter(live, **options) as writer:
        for step in range(STORED):
            append(writer, step)
    with RunWriter(live, resume_from_step=CHECKPOINT, **options) as writer:
        append(writer, STORED - 1)
        writer.compact(wait=True)
        for step in range(STORED, STEPS):
            append(writer, step)
        folder.mkdir()
        for path in (live / "run.h5", *sorted(live.glob("run.h5.wal.*"))):
            shutil.copy(path, folder)
    shutil.rmtree(live)


if __name__ == "__main__":
    target = FOLDER / f"run-{schema.SCHEMA_VERSION}"
    if target.exists():
        sys.exit(f"{target} is there and stays as it is. A new version gets a sample of its own.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(target)
    print(json.dumps({path.name: path.stat().st_size for path in target.iterdir()}))
