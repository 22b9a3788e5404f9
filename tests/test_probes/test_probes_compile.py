"""torch.compile after attach measures right (taps break the graph); before attach it is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gradscope import probes
from gradscope.errors import ProbeError

# Dynamo looks at the inputs of what comes after a broken graph, and torch warns it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
EXACT = 1e-12
SLOTS = ["solver/0", "judge/0", "judge/0", "solver/0", "judge/0", "solver/0"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, how, backend):
    if how == "wrapper":
        return torch.compile(model, backend=backend)
    model.compile(backend=backend)
    return model


def truth_of(model, x, y, slots):
    names = [name for name, _ in model.named_parameters()]
    found = {}
    for slot in dict.fromkeys(slots):
        rows = [row for row, name in enumerate(slots) if name == slot]
        loss = ((model(x[rows]) - y[rows]) ** 2).sum()
        found[slot] = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    return found


@pytest.mark.parametrize("mode", ["auto", "fused"])
@pytest.mark.parametrize("how", ["in place", "wrapper"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_after_attach(toy, nano, how, backend, mode):
    model, (x, y) = toy.model(), toy.data()
    truth = truth_of(model, x, y, SLOTS)
    scope = probes.attach(model, toy.slots, mode=mode)
    run = compiled(model, how, backend)
    for _ in range(2):  # compiled, then run from the cache
        with scope.rows(SLOTS):
            loss = ((run(x) - y) ** 2).sum()
        loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
        scope.step(toy.sgd(model))
        model.zero_grad()
        assert nano.gradient_error(found, truth) <= EXACT
    scope.detach()
    again = ((run(x) - y) ** 2).sum()
    again.backward()
    assert torch.equal(again.detach(), loss.detach())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_hooks_on_parameters_of_a_compiled_model(toy, nano, backend):
    model, (x, y) = nn.Sequential(nn.Linear(3, 8), toy.unknown_layer(), nn.Linear(8, 1)).double(), toy.data()
    slots = ["solver/0"] * 4 + ["judge/0"] * 2
    truth = truth_of(model, x, y, slots)
    for mode in ("auto", "pure"):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            scope = probes.attach(model, toy.slots, mode=mode)
        run = compiled(model, "wrapper", backend)
        for slot, rows in (("solver/0", slice(0, 4)), ("judge/0", slice(4, 6))):
            with scope.rows([slot] * len(x[rows])):
                loss = ((run(x[rows]) - y[rows]) ** 2).sum()
            loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
        assert scope.step(toy.sgd(model)).coverage == ()
        scope.detach()
        model.zero_grad()
        assert nano.gradient_error(found, truth) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora under checkpointing"])
def test_compiled_transformer(nano, kind):
    model, batch = nano.model() if kind == "full" else nano.lora(), nano.shuffled((3, 2, 4, 1))
    expected = nano.separate(model, [batch])
    if kind != "full":
        nano.checkpoint(model, reentrant=False)
        model.enable_input_require_grads()
    with probes.attach(model, nano.slots) as scope:
        run = compiled(model, "wrapper", "aot_eager")
        with scope.rows(batch.slots):
            loss = nano.loss(run, batch)
        loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in nano.slots}
        scope.step(torch.optim.SGD(model.parameters()))
    assert nano.gradient_error(found, expected) <= EXACT


def test_a_whole_graph_cannot_be_had(toy):
    """Taps break the graph: who forbids that is told so at the first forward pass."""
    model = toy.model()
    with probes.attach(model, toy.slots) as scope:
        run = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=r"(?s)torch\.compiler\.disable.*Tap"), scope.rows(SLOTS):
            run(toy.data()[0])


@pytest.mark.parametrize("how", ["in place", "wrapper"])
def test_compiled_before_attach_is_refused(toy, how):
    model = compiled(toy.model(), how, "eager")
    with pytest.raises(ProbeError, match="the model is compiled; attach to the model that was given"):
        probes.attach(model, toy.slots)
