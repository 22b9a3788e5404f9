"""Trackers are told what the run file is told, go on where a run goes on, and never stop it."""

import csv
import json
import sys
import types

import numpy as np
import pytest

import gradscope
from gradscope.errors import ConfigError, UnknownNameError
from gradscope.importers.importing import import_run
from gradscope.train import load_config, run
from gradscope.train.checkpoint import find_checkpoint
from gradscope.train.config.sections import TrackingSection
from gradscope.train.tracking.mirrors import Mirrors, check_installed

CELL = "single-shared-stack_code"


class StubWandb(types.ModuleType):
    """In place of W&B's library: keeps what it was told."""

    def __init__(self, *, fails_at=None):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")
        self.started, self.rows, self.finished, self.fails_at = [], [], 0, fails_at

    def init(self, **settings):
        self.started.append(settings)
        return self

    @property
    def id(self):
        return self.started[-1]["id"] or "made-by-wandb"

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, values):
        if values["train/global_step"] == self.fails_at:
            raise ConnectionError("the network\nis gone")
        self.rows.append(values)

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    stub = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def read_csv(path):
    with path.open(newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def test_a_run_is_mirrored_and_goes_on_where_it_was(small, tmp_path, wandb):
    folder = tmp_path / "run"
    to = "tracking.to=[csv, tensorboard, wandb]"
    run(small(CELL, to, "tracking.project=mine", "train.steps=2"), out=folder)
    assert wandb.started[0]["project"] == "mine"
    assert (wandb.started[0]["name"], wandb.started[0]["id"]) == ("run", None)
    state = json.loads((find_checkpoint(folder) / "state.json").read_text())
    assert state["tracker_ids"] == {"csv": "", "tensorboard": "", "wandb": "made-by-wandb"}

    run(small(CELL, to, "tracking.project=mine", "train.steps=4"), out=folder, resume=True)
    assert wandb.started[1]["id"] == "made-by-wandb"
    assert wandb.finished == 2
    opened = gradscope.open_run(folder)
    loss = opened["train"]["loss"].values
    rows = {row["step"]: row for row in read_csv(folder / "metrics.csv") if "train/loss" in row}
    assert sorted(rows) == [1, 2, 3, 4]
    np.testing.assert_array_equal([rows[step]["train/loss"] for step in range(1, 5)], loss)
    told = {row["train/global_step"]: row for row in wandb.rows if "train/loss" in row}
    np.testing.assert_array_equal([told[step]["train/loss"] for step in range(1, 5)], loss)
    assert (folder / "metrics.jsonl").is_file()
    assert "tracker_failed" not in opened["events"]["kind"].values

    import_run(folder / "metrics.csv", tmp_path / "table.h5")
    table = gradscope.open_run(tmp_path / "table.h5")
    assert 0 in opened["eval"]["step"].values  # an evaluation before the first step is no step
    assert table["train"]["step"].values.tolist() == [1, 2, 3, 4]
    assert table["eval"]["step"].values.tolist() == opened["eval"]["step"].values.tolist()
    assert table["eval"]["greedy"].values.tolist() == opened["eval"]["greedy"].values.tolist()

    import_run(folder / "tensorboard", tmp_path / "back.h5")
    back = gradscope.open_run(tmp_path / "back.h5")
    np.testing.assert_allclose(back["train"]["loss"], loss, rtol=1e-6)
    assert back["eval"]["num_correct"].values.tolist() == opened["eval"]["num_correct"].values.tolist()


def test_a_tracker_that_fails_is_left_out_with_one_warning_and_one_event(small, tmp_path, wandb):
    wandb.fails_at = 1
    with pytest.warns(
        UserWarning, match="tracker 'wandb' failed.*the network is gone.*training goes on"
    ) as told:
        result = run(small(CELL, "tracking.to=[wandb, csv]", "train.steps=3"), out=tmp_path / "run")
    assert len(told) == 1
    assert result.step == 3
    opened = gradscope.open_run(tmp_path / "run")
    events = opened["events"].to_dataset()
    own = events["message"].values[events["kind"].values == "tracker_failed"]
    assert len(own) == 1
    assert "the network is gone" in own[0]
    assert [row["step"] for row in read_csv(tmp_path / "run" / "metrics.csv") if "train/loss" in row] == [
        1,
        2,
        3,
    ]


def open_mirrors(folder, section, tell, **more):
    return Mirrors(
        section, folder, slots={"a": "a"}, policies={"a": "p"}, config={}, tell=tell,
        **{"run_ids": {}, "from_step": None, **more},
    )  # fmt: skip


def test_a_tracker_that_cannot_start_keeps_its_id_for_later(tmp_path, monkeypatch):
    broken = StubWandb()
    broken.init = lambda **settings: (_ for _ in ()).throw(OSError("no route"))
    monkeypatch.setitem(sys.modules, "wandb", broken)
    told = []
    with pytest.warns(UserWarning, match="no route"):
        mirrors = open_mirrors(
            tmp_path, TrackingSection(to=("wandb",)), lambda *event: told.append(event),
            run_ids={"wandb": "old"}, from_step=7,
        )  # fmt: skip
    with mirrors:
        mirrors.step(8, [], {"loss": 1.0})
    assert mirrors.run_ids == {"wandb": "old"}
    assert [(step, kind) for step, kind, _ in told] == [(7, "tracker_failed")]


def test_a_tracker_that_fails_at_the_end_fails_at_the_last_step_told(tmp_path, monkeypatch):
    broken = StubWandb()
    broken.finish = lambda: (_ for _ in ()).throw(OSError("no upload"))
    monkeypatch.setitem(sys.modules, "wandb", broken)
    told = []
    mirrors = open_mirrors(tmp_path, TrackingSection(to=("wandb",)), lambda *event: told.append(event))
    mirrors.step(8, [], {"loss": 1.0})
    with pytest.warns(UserWarning, match="no upload"):
        mirrors.close()
    assert [(step, kind) for step, kind, _ in told] == [(8, "tracker_failed")]


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_tables_forget_what_a_resume_forgets(tmp_path, to):
    section = TrackingSection(to=(to,))
    with open_mirrors(tmp_path, section, print) as mirrors:
        for step in range(1, 6):
            mirrors.step(step, [], {"loss": float(step)})
            mirrors.evaluation(step, {"dataset": "d", "num_correct": step, "num_total": 9, "greedy": False})
    with open_mirrors(tmp_path, section, print, from_step=3) as mirrors:
        mirrors.step(4, [], {"loss": 40.0})
    import_run(tmp_path / f"metrics.{to}", tmp_path / "back.h5")
    back = gradscope.open_run(tmp_path / "back.h5")
    assert back["train"]["loss"].values.tolist() == [1.0, 2.0, 3.0, 40.0]
    assert back["eval"]["num_correct"].values.tolist() == [1, 2, 3]


def test_names_are_checked_before_any_work(monkeypatch):
    with pytest.raises(
        UnknownNameError, match=r"tracking.to: unknown tracker 'tensorbord'. Did you mean 'tensorboard'"
    ):
        load_config(CELL, ["tracking.to=[tensorbord]"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'trackio' needs the package trackio, which is not installed"):
        check_installed(TrackingSection(to=("csv", "trackio")))
