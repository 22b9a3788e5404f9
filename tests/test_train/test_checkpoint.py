"""Checkpoints: exact round trip, whole or absent, pruned, refused when damaged, loadable by PEFT."""

import contextlib
import json
import os
import shutil
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from gradscope.errors import RunFileError
from gradscope.train.checkpoint import (
    State,
    checkpoint_steps,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from gradscope.train.model import load_model
from gradscope.train.session import Session


@pytest.fixture
def trained(small):
    session = Session(small("voting-isolated-stack_code", "probes.enabled=false"))
    session.train_step(1)
    return session


def save(session, folder, step, *, keep=3, **best):
    state = State(step, session.policies.names, **best)
    return save_checkpoint(folder, session.policies, state, keep=keep)


def test_round_trip_is_exact(trained, small, tmp_path):
    path = save(trained, tmp_path, 1, best_step=1, best_accuracy=0.5)
    other = Session(small("voting-isolated-stack_code", "probes.enabled=false", "train.seed=5"))
    state = load_checkpoint(path, other.policies)
    assert state == State(1, ("generator", "aggregator"), 1, 0.5)
    for name in trained.policies.names:
        theirs = other.policies.parameters(name)
        for key, value in trained.policies.parameters(name).items():
            assert torch.equal(value, theirs[key])
            mine = trained.policies.optimizers[name].state[value]
            for entry, tensor in other.policies.optimizers[name].state[theirs[key]].items():
                assert torch.equal(tensor, mine[entry])
    assert trained.policies.optimizers[name].state


def test_peft_loads_an_adapter(trained, small, tmp_path):
    path = save(trained, tmp_path, 1)
    config = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = PeftModel.from_pretrained(load_model(config.model), str(path / "aggregator"))
    ids = torch.tensor([[4, 12, 13, 14]])
    trained.policies.activate("aggregator")
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=ids).logits, trained.policies.network(input_ids=ids).logits)


def test_old_ones_go_and_the_best_stays(trained, tmp_path):
    for step in range(1, 7):
        save(trained, tmp_path, step, keep=2, best_step=2 if step >= 2 else 1)
    assert checkpoint_steps(tmp_path) == [2, 5, 6]
    assert find_checkpoint(tmp_path).name == "step_000006"
    assert find_checkpoint(tmp_path, "best").name == "step_000002"
    assert find_checkpoint(tmp_path, 5).name == find_checkpoint(tmp_path, "5").name == "step_000005"
    with pytest.raises(RunFileError, match=r"no checkpoint '4'\. Allowed: last, best, 2, 5, 6"):
        find_checkpoint(tmp_path, 4)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_000002", "step_000005", "step_000006"}


def test_the_one_just_written_stays_beside_later_ones_of_another_run(trained, tmp_path):
    for step in (7, 8, 9):
        save(trained, tmp_path, step)
    assert save(trained, tmp_path, 1, keep=2).is_dir()
    assert checkpoint_steps(tmp_path) == [1, 8, 9]


CRASHES = [(torch, "save"), (os, "replace"), (shutil, "rmtree"), (os, "fsync")]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("module", "function"), CRASHES)
def test_a_crash_while_saving_leaves_the_one_before(trained, tmp_path, monkeypatch, module, function, step):
    save(trained, tmp_path, 1, best_step=1)
    before = load_file(tmp_path / "checkpoints" / "step_000001" / "generator" / "adapter_model.safetensors")

    def die(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, function, die)
        with contextlib.suppress(KeyboardInterrupt):
            save(trained, tmp_path, step, best_step=step)
    assert checkpoint_steps(tmp_path) == [1]
    found = find_checkpoint(tmp_path, "best")
    assert found.name == "step_000001"
    load_checkpoint(found, trained.policies)
    for key, value in before.items():
        assert torch.equal(load_file(found / "generator" / "adapter_model.safetensors")[key], value)
    save(trained, tmp_path, 2, best_step=2)
    assert checkpoint_steps(tmp_path) == [1, 2]
    assert find_checkpoint(tmp_path, "best").name == "step_000002"


def test_saving_a_step_again_takes_its_new_state(trained, tmp_path):
    save(trained, tmp_path, 0)
    path = save(trained, tmp_path, 0, best_step=0, best_accuracy=0.25)
    assert load_checkpoint(path, trained.policies).best_accuracy == 0.25
    assert [file.name for file in path.parent.iterdir()] == ["step_000000"]


def test_a_policy_called_like_a_module_is_saved_whole(small, tmp_path):
    routing = "policy.routing={generator: layers, aggregator: other}"
    settings = ("voting-isolated-stack_code", "probes.enabled=false", routing)
    session, other = Session(small(*settings)), Session(small(*settings, "train.seed=5"))
    session.train_step(1)
    path = save(session, tmp_path, 1)
    load_checkpoint(path, other.policies)
    for name in ("layers", "other"):
        assert len(load_file(path / name / "adapter_model.safetensors")) == 28
        theirs = other.policies.parameters(name)
        for key, value in session.policies.parameters(name).items():
            assert torch.equal(value, theirs[key])


def test_none_yet(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path, "best") is None


def test_what_does_not_fit_is_refused(trained, small, tmp_path):
    path = save(trained, tmp_path, 1)
    shared = Session(small("voting-shared-stack_code", "probes.enabled=false"))
    with pytest.raises(RunFileError, match="holds policies generator, aggregator"):
        load_checkpoint(path, shared.policies)
    wider = Session(small("voting-isolated-stack_code", "probes.enabled=false", "policy.rank=4"))
    with pytest.raises(RunFileError, match="does not fit the model and adapters"):
        load_checkpoint(path, wider.policies)


@pytest.mark.parametrize(
    "file", ["generator/adapter_model.safetensors", "generator/optimizer.pt", "state.json"]
)
def test_a_damaged_file_is_refused_in_one_line(trained, tmp_path, file):
    path = save(trained, tmp_path, 1)
    (path / file).write_bytes((path / file).read_bytes()[:40])
    with pytest.raises(RunFileError) as caught:
        load_checkpoint(path, trained.policies)
    assert "\n" not in str(caught.value)


def test_state_is_plain_json(trained, tmp_path):
    path = save(trained, tmp_path, 3)
    assert json.loads((path / "state.json").read_text())["step"] == 3
