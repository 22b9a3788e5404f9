"""Evidence of a run: modules, rows and influence are recorded, and training does not notice."""

import gzip
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gradscope
from gradscope.train import run
from gradscope.train.checkpoint import find_checkpoint
from gradscope.train.session import Session

EVERYTHING = (
    "probes.modules_every=2",
    "probes.rows_every=3",
    "probes.top_rows=2",
    "probes.sketch_dim=16",
    "probes.influence_every=3",
)


def weights(folder):
    last = find_checkpoint(folder)
    return {
        f"{path.parent.name}/{name}": value
        for path in last.rglob("adapter_model.safetensors")
        for name, value in load_file(path).items()
    }


def said(folder, step):
    """Row id -> text, of what was recorded of a step."""
    with gzip.open(folder / "episodes" / f"step_{step:06d}.jsonl.gz", "rt") as lines:
        episodes = [json.loads(line) for line in lines]
    return {row["row_id"]: row["text"] for episode in episodes for row in episode["rows"]}


@pytest.mark.parametrize("cell", ["voting-shared-stack_code", "voting-isolated-stack_code"])
def test_a_run_with_everything_on(small, tmp_path, cell):
    plain = small(cell, "probes.enabled=false", "evaluate.every=0", "train.checkpoint_every=0")
    looked = small(cell, *EVERYTHING, "evaluate.every=0", "train.checkpoint_every=0")
    for name, config in (("plain", plain), ("looked", looked)):
        run(config, out=tmp_path / name)
    ours, theirs = weights(tmp_path / "plain"), weights(tmp_path / "looked")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    tree = gradscope.open_run(tmp_path / "looked")
    assert "probe_disabled" not in tree["events"]["kind"].values
    policies = 1 if "shared" in cell else 2
    _check_modules(tree, policies)
    _check_rows(tree, tmp_path / "looked", policies)
    _check_influence(tree, policies)


def _check_modules(tree, policies):
    modules = tree["modules"]
    assert sorted(set(modules["step"].values)) == [1, 3]
    assert modules.sizes["module_update"] == 2 * policies
    # Norms of modules add up to the norm of the slot in the update.
    for number, update in enumerate(modules["update"].values.astype(int)):
        gram = tree["updates"]["gram"].sel(update=update).values
        squares = (modules["grad_norm"].isel(module_update=number).values.astype(float) ** 2).sum(axis=1)
        there = ~np.isnan(np.diag(gram))
        assert squares[there] == pytest.approx(np.diag(gram)[there], rel=1e-4)
    change = modules["change_gram"].isel(module_update=-1)
    crossing = change.sel(contributor="aggregator", contributor_b="generator").values
    assert np.isfinite(crossing).all()


def _check_rows(tree, folder, policies):
    rows, updates = tree["rows"], tree["updates"]
    whole = {int(n) for n in updates["update"].values if updates["step"].sel(update=n) in (1, 4)}
    assert len(whole) == 2 * policies
    ids = rows["row_id"].values
    assert len(ids) == len(set(ids))
    for number in updates["update"].values:
        own = rows["update"].values == number
        sketched = np.isfinite(rows["sketch"].values[own]).all(axis=1)
        norms = rows["grad_norm"].values[own]
        count = updates["num_rows"].sel(update=number)
        if int(number) in whole:
            assert own.sum() == int(count.sum())
            assert sketched.all()
            _check_sums(tree, number, own)
        else:
            measured = np.isfinite(norms)
            assert measured.sum() == 2
            assert not sketched.any()
            step = int(updates["step"].sel(update=number))
            assert set(ids[own][measured]) <= set(said(folder, step))
    assert all(name for name in rows["episode"].values)
    assert set(rows["problem"].values[:5]) <= {str(p) for p in rows["problem"].values}
    quiet = (rows["advantage"].values == 0) & np.isfinite(rows["grad_norm"].values)
    assert (rows["grad_norm"].values[quiet] == 0).all()
    assert quiet.any()


def _check_sums(tree, number, own):
    """The norms of a slot's rows bound that of its gradient, and its sketches add up to about it."""
    rows = tree["rows"]
    gram = tree["updates"]["gram"].sel(update=number)
    for slot in tree["slot"].values:
        norm = float(np.sqrt(gram.sel(slot=slot, slot_b=slot).values))
        mine = own & (rows["row_slot"].values == slot)
        if np.isfinite(norm):
            assert norm <= rows["grad_norm"].values[mine].sum() * (1 + 1e-5)


def _check_influence(tree, policies):
    influence = tree["updates"]["influence"]
    due = influence.dropna("update", how="all")
    steps = tree["updates"]["step"].sel(update=due["update"]).values
    assert sorted(set(steps)) == [1, 4]
    assert len(steps) == 2 * policies
    own = due.isel(update=0).sel(slot="generator/0", contributor="generator")
    assert float(own.values) > 0
    across = due.isel(update=0).sel(slot="aggregator/0", contributor="generator").values
    assert np.isfinite(across) == (policies == 1)
    assert float(due.min()) >= 0


def test_a_failing_influence_puts_the_probe_away_and_the_weights_are_those_of_the_step(small, monkeypatch):
    settings = ("voting-shared-stack_code", "evaluate.every=0")
    plain = Session(small(*settings, "probes.enabled=false"))
    looked = Session(small(*settings, "probes.influence_every=1"))
    monkeypatch.setattr(looked.updater, "_logits_of", lambda slot, samples: torch.zeros(2, dtype=torch.long))
    first, second = plain.train_step(1), looked.train_step(1)
    assert [kind for kind, _ in first.events] == []
    assert [kind for kind, _ in second.events] == ["probe_disabled"]
    pairs = zip(plain.policies.network.parameters(), looked.policies.network.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
