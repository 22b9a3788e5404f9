"""Measures updates in a loop of one's own on Hugging Face accelerate.

    scope = probes.attach(model, slots)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            with scope.rows(batch["slot"]):
                loss = loss_fn(model(batch["input"]))
            accelerator.backward(loss)
            record = step(accelerator, scope, optimizer)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

A model may be prepared before or after `attach`; a prepared one is attached as
`accelerator.unwrap_model(model)`.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

from gradscope.errors import ProbeError
from gradscope.probes.scope import Scope
from gradscope.runfile.update import UpdateRecord

HIDES_GRADIENTS = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Kinds of training whose gradients are not in `.grad` when the optimizer steps."""


def step(
    accelerator: Accelerator, scope: Scope, optimizer: torch.optim.Optimizer
) -> UpdateRecord | list[UpdateRecord] | None:
    """Returns what `Scope.step` does where the optimizer is about to step; None while gradients accumulate.

    Call it after every `accelerator.backward`, before clipping. With `mixed_precision='fp16'` numbers are in
    units of the unscaled loss.

    Args:
        accelerator: Of the loop.
        scope: Of its model.
        optimizer: As the loop holds it, prepared or not.

    Raises:
        ProbeError: As `Scope.step`; or a kind of training that hides gradients.
    """
    check_gradients(accelerator)
    return scope.step(optimizer, accelerator.scaler) if accelerator.sync_gradients else None


def check_gradients(accelerator: Accelerator) -> None:
    """Checks that gradients lie where they can be read.

    Raises:
        ProbeError: They do not.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in HIDES_GRADIENTS:
        raise ProbeError(f"gradients cannot be read under {kind}; use DDP or FSDP2.")
