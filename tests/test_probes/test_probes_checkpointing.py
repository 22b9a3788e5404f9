"""Activation checkpointing, both kinds, called by hand or switched on after attach."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscope import probes

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)


class Checkpointed(nn.Module):
    """Calls torch's checkpoint itself."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3)]
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["auto", "pure"])
@pytest.mark.parametrize("together", [False, True])
def test_checkpoint_called_by_hand(toy, nano, reentrant, mode, together):
    model = Checkpointed(reentrant).double()
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    runs = [(["solver/0"] * 2, x[:2]), (["judge/0"], x[2:3]), (["solver/0"] * 3, x[3:])]
    plain = Checkpointed(False).double()
    truth = {}
    for slot in toy.slots:
        own = torch.cat([part for names, part in runs if names[0] == slot])
        gradients = torch.autograd.grad((plain(own) ** 2).sum(), list(plain.parameters()))
        truth[slot] = dict(zip((name for name, _ in plain.named_parameters()), gradients, strict=True))
    with probes.attach(model, toy.slots, mode=mode) as scope:
        losses = []
        for names, part in runs:
            with scope.rows(names):
                losses.append((model(part) ** 2).sum())
            if not together:
                losses.pop().backward()
        if together and mode == "auto":
            sum(losses).backward()
        elif together:  # one slot only may be in a backward
            (losses[0] + losses[2]).backward()
            losses[1].backward()
        found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
        scope.step(toy.sgd(model))
    assert nano.gradient_error(found, truth) <= EXACT


def test_checkpointing_enabled_after_attach(nano):
    model, batches = nano.lora(), [nano.shuffled(UNEVEN, seed=seed) for seed in range(2)]
    expected = nano.separate(model, batches)

    def run(scope):
        nano.checkpoint(model, reentrant=True)
        model.enable_input_require_grads()
        losses = []
        for batch in batches:
            with scope.rows(batch.slots):
                losses.append(nano.loss(model, batch))
        sum(losses).backward()

    nano.check(model, batches, run=run, expected=expected)
