"""Copies and pickles of a probed model, or of its optimizer, are those of the same model without a probe."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from gradscope import probes

MODES = ("auto", "observe", "pure", "fused")


def build(nano, kind):
    if kind == "lora":
        return nano.lora(target_modules=["q_proj", "down_proj"], lora_dropout=0.2).train()
    if kind == "checkpointed":
        model = nano.lora(target_modules=["q_proj", "down_proj"], lora_dropout=0.2)
        nano.checkpoint(model, reentrant=True)
        model.enable_input_require_grads()
        return model
    return nano.model().train()


def reloaded(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": reloaded,
}


def left_behind(model):
    """What of a probe is on a model: hooks, forwards and whatever else modules hold."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else [value]
            found += [(name, key) for one in held if type(one).__module__.startswith("gradscope.probes")]
            found += [(name, key) for one in held if "gradscope" in getattr(one, "__module__", "")]
    return found + [(name, "hook") for name, p in model.named_parameters() if p._backward_hooks]


def train(nano, model, steps=2):
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for seed in range(steps):
        nano.loss(model, nano.shuffled((2, 1, 1, 1), seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_carries_nothing_of_the_probe(nano, how, mode):
    model = build(nano, "lora")
    theirs = model.base_model.model.model.layers[0].register_forward_hook(_their_hook)
    scope = probes.attach(model, nano.slots, mode=mode)
    assert left_behind(model)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    copied = COPIES[how](model)
    assert left_behind(copied) == []
    hooks = copied.base_model.model.model.layers[0]._forward_hooks
    assert list(hooks.values()) == [_their_hook]
    for name, module in model.named_modules():
        assert vars(module) == before[name]
    scope.detach()
    assert left_behind(model) == []
    theirs.remove()


def _their_hook(module, args, output):
    """A hook of the caller's, which copies keep."""


@pytest.mark.parametrize("kind", ["lora", "full", "checkpointed"])
@pytest.mark.parametrize("mode", ["auto", "fused"])
def test_a_copy_trains_bitwise_as_a_copy_of_a_model_without_probe(nano, kind, mode):
    expected = train(nano, copy.deepcopy(build(nano, kind)))
    model = build(nano, kind)
    with probes.attach(model, nano.slots, mode=mode):
        copied = copy.deepcopy(model)
        found = train(nano, copied)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["auto", "fused"])
def test_a_copy_is_probed_beside_the_original(nano, mode):
    model, batch = build(nano, "lora"), nano.shuffled((2, 1, 1, 1))
    model.eval()
    with probes.attach(model, nano.slots, mode=mode) as scope:
        copied = copy.deepcopy(model)
        records = []
        for one, probe in ((model, scope), (copied, probes.attach(copied, nano.slots, mode=mode))):
            with probe.rows(batch.slots):
                nano.loss(one, batch).backward()
            records.append(probe.step(torch.optim.SGD(one.parameters(), lr=0.1)))
        assert (records[0].gram == records[1].gram).all()
        assert (records[0].gram != 0).all()


def test_a_reference_policy_inside_rows_counts_for_nothing(nano):
    """The copy is called where rows are announced, as a loss with a divergence does."""
    model, batch = build(nano, "lora").eval(), nano.shuffled((2, 1, 1, 1))
    expected = nano.gram(nano.separate(model, [batch]))
    with probes.attach(model, nano.slots) as scope:
        reference = copy.deepcopy(model)
        with scope.rows(batch.slots):
            loss = nano.loss(model, batch) + nano.loss(reference, batch)
        loss.backward()
        record = scope.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert nano.gram_error(record.gram, expected) <= 1e-12


def test_hooks_on_parameters_stay_behind(toy):
    model = nn.Sequential(toy.model(), nn.Sequential(toy.unknown_layer(), nn.Linear(8, 1)).double())
    model[0][3] = nn.Linear(8, 8).double()
    with pytest.warns(UserWarning, match="covered only in updates"):
        scope = probes.attach(model, toy.slots)
    copied = copy.deepcopy(model)
    assert left_behind(copied) == []
    x, _ = toy.data()
    with scope.rows(["solver/0"] * 6):
        (model(x).sum() + copied(x).sum()).backward()
    assert scope.step(toy.sgd(model)).coverage == ()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), copied.parameters(), strict=True)
    )
    scope.detach()


def test_an_optimizer_is_copied_and_pickled_without_its_hooks(toy):
    model = toy.model()
    optimizer = torch.optim.Adam(model.parameters())
    with probes.attach(model, toy.slots) as scope:
        toy.run(scope, model, ["solver/0"] * 3 + ["judge/0"] * 3)
        scope.step(optimizer)
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert not copied._optimizer_step_pre_hooks
            assert not copied._optimizer_step_post_hooks


def test_a_pickle_is_read_where_gradscope_is_not(toy, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    with probes.attach(model, toy.slots, mode="fused"):
        torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch; sys.modules['gradscope'] = None; "
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); "
        "print(float(model(torch.ones(1, 3, dtype=torch.float64)).detach().sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) == float(model(torch.ones(1, 3, dtype=torch.float64)).detach().sum())
