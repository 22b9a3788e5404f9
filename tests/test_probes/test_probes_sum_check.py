"""The sum check judges rounding by what was added up in the update itself, whatever came before it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.errors import ProbeError

KINDS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "autocast": torch.float32,
}


class Case:
    """A network of one kind of numbers, with the slots of `toy`."""

    def __init__(self, kind, toy):
        torch.manual_seed(0)
        self.autocast = kind == "autocast"
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(KINDS[kind])
        self.dtype = KINDS[kind]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.scope = probes.attach(self.model, toy.slots)
        self.rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(self.dtype)

    def backward(self, weights, *, rows=None, announced=True):
        """One row of each slot for two weights: the rows repeat, so that weights may cancel in a slot."""
        slots = (["solver/0", "judge/0"] * len(weights))[: len(weights)]
        x = self.rows[:2].repeat(len(weights) // 2, 1) if rows is None else rows
        announce = self.scope.rows(slots) if announced else contextlib.nullcontext()
        low = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast)
        with announce, low:
            losses = self.model(x).float().pow(2).sum(1)
        (losses * torch.tensor(weights)).sum().backward()

    def step(self):
        record = self.scope.step(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return record


@pytest.fixture(params=KINDS)
def case(request, toy):
    case = Case(request.param, toy)
    yield case
    case.scope.detach()


SPIKE = [1e4, -1e4, 2e4, 1e4]


def test_gradients_clipped_before_step_are_seen_after_a_large_update(case):
    case.backward(SPIKE)
    case.step()
    case.backward([1.0, 2.0])
    nn.utils.clip_grad_norm_(case.model.parameters(), 0.01)
    with pytest.raises(ProbeError, match=r"miss autograd's gradient.*clipped"):
        case.step()


def test_a_micro_batch_outside_rows_is_seen_after_a_large_update(case):
    case.backward(SPIKE)
    case.step()
    case.backward([1.0, 2.0])
    case.backward([1.0, -1.0], rows=case.rows[2:], announced=False)
    with pytest.raises(ProbeError, match=r"miss autograd's gradient.*outside rows"):
        case.step()


@pytest.mark.parametrize(
    "micro_batches",
    [
        [[1.1, 0.7, -1.1, -0.7]],
        [[1.1, 0.7], [-1.1, -0.7]],
        [[1.1, 0.7, 0.3, 0.9], [-1.1, -0.7], [-0.3, -0.9]],
        [[0.0, 0.0]],
    ],
    ids=["in one call", "in two", "in three", "zero"],
)
def test_gradients_that_cancel_to_rounding_are_accepted_in_the_first_update(case, micro_batches):
    for weights in micro_batches:
        case.backward(weights)
    record = case.step()
    assert record.gram.shape == (2, 2)
    assert abs(record.gram).max() < 1e-3


def test_slots_that_cancel_each_other_are_accepted(toy):
    """Slots that are large, a sum that is small: what is added up is the slots."""
    case = Case("float32", toy)
    with case.scope.rows(["solver/0", "judge/0"]):
        loss = case.model(case.rows[[0, 0]])[:, 0]
    (loss * torch.tensor([1.0, -1.0])).sum().backward()
    before = copy.deepcopy([p.grad for p in case.model.parameters()])
    assert sum(float(g.norm()) for g in before) < 1e-5
    assert case.step().gram[0, 0] > 1e-2
