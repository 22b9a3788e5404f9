"""Instruments the FSDP actor of verl: rows come from the batch's `non_tensor_batch`.

    instrument(worker, slots={"solver/0": "solver", "judge/0": "judge"}, slot_of="agent", writer="runs/mine")

A batch's strings travel through verl's mini-batches and micro-batches, dynamic ones too, so that each forward
pass knows its rows. With remove-padding a micro-batch is one packed row, and an entry stands for a token.

Two update loops are known. Up to verl 0.7 it is `DataParallelPPOActor.update_policy`, from then on
`TrainingWorker.train_mini_batch`, which drives an engine (`FSDPEngine`). In both a training step is one call,
with an update for each mini-batch.

Legend: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradscope.errors import ProbeError
from gradscope.probes.attribution import Attribution
from gradscope.probes.evidence import Evidence
from gradscope.probes.integrations.examples import Column, RowSource
from gradscope.probes.integrations.session import Plan
from gradscope.probes.integrations.verl_loops import ActorLoop, EngineLoop, Loop
from gradscope.probes.targets import Mode
from gradscope.runfile import RunWriter


def instrument(
    worker: Any,
    *,
    slots: Mapping[str, str],
    slot_of: Column = "slot",
    writer: RunWriter | str | Path,
    problem_of: Column | None = "uid",
    row_id_of: Column | None = None,
    policies: Mapping[str, str] | None = None,
    mode: Mode = "auto",
    attribution: Attribution | None = None,
    evidence: Evidence | None = None,
    last_step: int = 0,
) -> Loop:
    """Measures the updates of a worker from now on; `close()` of what is returned ends that.

    Call it in the worker's process, after the model is made and, if any, its checkpoint loaded.

    Args:
        worker: `ActorRolloutRefWorker`, `TrainingWorker`, an FSDP engine or a `DataParallelPPOActor`.
        slots: Slot -> role, in the order of every result.
        slot_of: Column of `non_tensor_batch` with the slot of a row, or a function of a row's columns.
        writer: A run directory, resumed where `last_step` is above 0, or an open RunWriter.
        problem_of: Column or function that gives the problem of a row.
        row_id_of: Column or function that gives the name of a row; by default its number.
        policies: Role or slot -> policy; None sends all to the active adapter.
        mode: As for `probes.attach`.
        attribution: As for `probes.attach`.
        evidence: As for `probes.attach`.
        last_step: Training step of the checkpoint that the worker goes on from.

    Raises:
        ProbeError: Nothing that is known, or a training whose gradients cannot be told apart: Megatron,
            FSDP 1, sequence parallelism, fp16, fused kernels with a trained head.
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
    inner = _innermost(worker)
    if all(hasattr(inner, name) for name in EngineLoop.needs):
        return EngineLoop(inner, source, plan, last_step=last_step)
    if all(hasattr(inner, name) for name in ActorLoop.needs):
        return ActorLoop(inner, source, plan, last_step=last_step)
    raise ProbeError(
        f"instrument(): {type(inner).__name__} has neither {', '.join(EngineLoop.needs)} (the FSDP engine) "
        f"nor {', '.join(ActorLoop.needs)} (its DataParallelPPOActor); Megatron and other engines keep "
        "gradients elsewhere. Use actor.strategy=fsdp2, and call it after init_model()."
    )


def _innermost(worker: Any) -> Any:
    """Returns the engine or actor that a worker drives."""
    for name in ("actor", "engine"):
        inner = getattr(worker, name, None)
        if inner is not None:
            return _innermost(inner)
    return worker
