"""A loop on accelerate: accumulation, clipping, bf16, a wrapped optimizer, attached before or after."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from gradscope import probes
from gradscope.errors import ProbeError
from gradscope.probes.integrations.accelerate import step

UPDATES = 3


@pytest.fixture(autouse=True)
def fresh_state():
    """Forgets the settings that accelerate keeps for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Run:
    """A loop of three updates of two micro-batches, with or without a probe."""

    def __init__(
        self, nano, *, probe, attach_first=True, dtype=torch.float64, mixed_precision="no", scaler=None
    ):
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
        )
        self.accelerator.scaler = scaler
        model = nano.lora(dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scope = probes.attach(model, nano.slots) if probe and attach_first else None
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if scaler is not None:  # what accelerate makes of fp16, which it refuses on a CPU
            self.accelerator.native_amp = True
            self.accelerator.state._mixed_precision = "fp16"
        if probe and not attach_first:
            self.scope = probes.attach(self.accelerator.unwrap_model(self.model), nano.slots)
        self.records, self.updates = [], []
        for update in range(UPDATES):
            batches = [nano.shuffled((2, 1, 3, 2), seed=10 * update + place) for place in range(2)]
            self.updates.append((self.weights(), batches))
            for batch in batches:
                self.micro_batch(nano, batch)

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def micro_batch(self, nano, batch):
        with self.accelerator.accumulate(self.model):
            if self.scope is None:
                loss = nano.loss(self.model, batch)
            else:
                with self.scope.rows(batch.slots):
                    loss = nano.loss(self.model, batch)
            self.accelerator.backward(loss)
            if self.scope is not None:
                record = step(self.accelerator, self.scope, self.optimizer)
                assert (record is None) == (not self.accelerator.sync_gradients)
                self.records += [record] if record is not None else []
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("attach_first", [True, False])
def test_slots_of_an_accumulated_update_and_bitwise_weights(nano, attach_first):
    plain = Run(nano, probe=False)
    probed = Run(nano, probe=True, attach_first=attach_first)
    expected = plain.weights()
    assert all(torch.equal(found, expected[name]) for name, found in probed.weights().items())
    assert len(probed.records) == UPDATES
    model = nano.lora()
    for record, (weights, batches) in zip(probed.records, probed.updates, strict=True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        gram = nano.gram(nano.separate(model, batches)) / 4  # accelerate divides by the two micro-batches
        assert nano.gram_error(record.gram, gram) <= 1e-12


def test_the_wrapped_optimizers_changes_are_attributed(nano):
    for record in Run(nano, probe=True).records:
        assert record.attribution_reason is None
        assert record.attribution_residual <= 1e-10
        assert record.scalars["clip_factor"] < 1


def test_bf16_adds_up_to_autograds_gradient(nano):
    plain = Run(nano, probe=False, dtype=torch.float32, mixed_precision="bf16")
    probed = Run(nano, probe=True, dtype=torch.float32, mixed_precision="bf16")
    expected = plain.weights()
    assert all(torch.equal(found, expected[name]) for name, found in probed.weights().items())
    for record in probed.records:
        assert np.isfinite(record.gram).all()
    assert probed.scope.residuals["default"] <= 3e-3


def test_a_loss_scale_that_changes_is_taken_out(nano):
    """In float64 powers of two change nothing, so that the records must be those of a loop without."""
    loops = {}
    for name, scale in (("plain", None), ("probed", None), ("scaled", 1024.0)):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
        loops[name] = Run(nano, probe=name != "plain", scaler=scaler)
    assert scaler.get_scale() == 1024 * 2**UPDATES
    expected = loops["plain"].weights()
    assert all(torch.equal(found, expected[name]) for name, found in loops["scaled"].weights().items())
    for record, scaled in zip(loops["probed"].records, loops["scaled"].records, strict=True):
        np.testing.assert_allclose(scaled.gram, record.gram, rtol=1e-12)
        np.testing.assert_allclose(scaled.update_gram, record.update_gram, rtol=1e-9, atol=1e-16)
        assert scaled.scalars["grad_norm"] == pytest.approx(record.scalars["grad_norm"], rel=1e-12)
        assert scaled.attribution_residual <= 1e-10


def test_a_step_that_the_scaler_leaves_out_is_said_to_be_skipped(nano):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    run = Run(nano, probe=True, dtype=torch.float32, scaler=scaler)
    assert run.records[0].scalars["skipped"] == 1.0


def test_gradients_that_cannot_be_read_are_refused(nano):
    run = Run(nano, probe=True)
    run.accelerator.state.distributed_type = "DistributedType.DEEPSPEED"
    with pytest.raises(ProbeError, match="gradients cannot be read under DEEPSPEED; use DDP or FSDP2"):
        step(run.accelerator, run.scope, run.optimizer)
