"""`gradscope watch`: what a frame shows, that it follows a run that grows and is resumed, and how it ends."""

import numpy as np
import pytest
from rich.console import Console

import gradscope
from gradscope import cli, derive, synthetic
from gradscope.detectors.series import policy_series
from gradscope.runfile import RunWriter, UpdateRecord
from gradscope.warner import replay
from gradscope.watch.alarms import Alarm, Alarms, Group, groups
from gradscope.watch.follow import follow, look, signature_of
from gradscope.watch.snapshot import Snapshot
from gradscope.watch.view import curve, view

SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge[red]/0": "judge[red]"}
POLICIES = {"solver": "both", "judge[red]": "both"}


def append(writer, step, scale=1.0):
    gram = scale * np.array([[4.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    writer.append(
        step, UpdateRecord("both", tuple(SLOTS), gram), metrics={"episode_reward_mean": float(step)}
    )


def shown(snapshot, width=100):
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(view(snapshot, width=width))
    return capture.get()


def test_a_frame(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        for step in range(1, 6):
            append(writer, step)
        writer.append_evaluation(5, num_correct=41, num_total=100, dataset="held_out")
        writer.append_event(5, "nonfinite_update", "policy [bold]'both'")
        frame = shown(look(tmp_path / "run", Alarms()))  # nothing is compacted yet: it reads the journal
    lines = frame.splitlines()
    assert lines[0] == "run: step 5, going on or cut off"
    assert lines[1].split() == ["reward", "5.000", "▁▃▅▇█"]
    assert lines[2].startswith("held_out, sampled")
    assert "0.410 (0.319-0.508) at 5" in lines[2]
    assert "norm, solver" in frame
    assert "norm, judge[red]" in frame
    assert "coherence, copies of solver" in frame
    # Energies 12 and 4: the solver's is |g1 + g2|^2.
    assert "solver 75%" in frame
    assert "judge[red] 25%" in frame
    assert "step 5: nonfinite_update: policy [bold]'both'" in frame
    assert all(len(line) <= 100 for line in lines)


def test_narrow_terminals_keep_the_numbers(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        for step in range(1, 90):
            append(writer, step)
        frame = shown(look(tmp_path / "run", Alarms()), width=60)
    assert all(len(line) <= 60 for line in frame.splitlines())
    assert "89.000" in frame


def test_curves():
    assert curve(np.array([0.0, 1.0, np.nan, 0.5]), 10) == "▁█·▅"
    assert curve(np.array([2.0, 2.0]), 10) == "▅▅"
    assert curve(np.full(3, np.nan), 10) == "···"
    assert curve(np.array([]), 10) == ""
    assert len(curve(np.arange(1000.0), 40)) == 40


def test_it_follows_a_run_that_grows_and_is_resumed(tmp_path):
    path = tmp_path / "run"
    writers = [RunWriter(path, slots=SLOTS, policies=POLICIES)]
    append(writers[0], 1)
    seen = []

    def wait(seconds):
        """In place of time going by: what the training process does meanwhile."""
        assert seconds >= 0.5
        if len(seen) == 1:
            append(writers[0], 2)
            append(writers[0], 3)
        elif len(seen) == 2:
            writers[0].compact(wait=True)
        elif len(seen) == 3:
            writers[0].close()
            writers.append(RunWriter(path, slots=SLOTS, policies=POLICIES, resume_from_step=1))
            append(writers[1], 2)
        else:
            writers[1].close()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(path, seen.append, interval=0.5, wait=wait)
    assert all(isinstance(what, Snapshot) for what in seen)
    assert [(what.step, what.segment) for what in seen] == [(1, 0), (3, 0), (3, 0), (2, 1)]
    assert seen[-1].events[-1][1] == "resume"


def test_nothing_is_read_while_nothing_changes_and_a_run_that_goes_away_is_said(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path, slots=SLOTS, policies=POLICIES) as writer:
        append(writer, 1)
    seen, looks = [], []

    def wait(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            path.rename(tmp_path / "away")
        elif len(looks) == 4:
            (tmp_path / "away").rename(path)
        elif len(looks) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(path, seen.append, interval=0.5, wait=wait)
    first, gone = seen
    assert first.step == 1
    assert "no such file or directory" in gone
    assert signature_of(path)


def test_alarms_are_those_of_the_warner_and_begin_anew_after_a_resume(tmp_path):
    rng = np.random.default_rng(0)
    steps = np.arange(300.0)
    rise = np.where(steps > 220, 2.0, 0.0)
    size, kappa = rng.normal(size=300) * 0.3 + rise, rng.normal(size=300) * 0.05 + 0.2 * rise
    expected = replay(size, kappa)
    assert expected[-1]
    begin = int(np.flatnonzero(~expected)[-1]) + 1
    alarms = Alarms()
    for upto in (50, 50, 180, 300):  # in portions, one of them twice
        part = Group("copies of x", steps[:upto], size[:upto], kappa[:upto])
        standing = alarms.update([part], segment=0)
    assert [alarm for alarm in standing if alarm.last_step is None] == [Alarm("copies of x", begin)]
    back = alarms.update([Group("copies of x", steps, size - rise, kappa - 0.2 * rise)], segment=1)
    assert all(alarm.last_step is not None for alarm in back)
    assert alarms.update([Group("copies of x", steps[:200], size[:200], kappa[:200])], segment=2) == []


def test_groups_are_copies_and_the_roles_of_shared_policies(tmp_path):
    synthetic.write_run(tmp_path / "run", "healthy", seed=0, num_steps=12, num_evaluations=9)
    run = gradscope.open_run(tmp_path / "run")
    found = {group.subject: group for group in groups(policy_series(run))}
    assert set(found) == {"copies of generator", "roles on shared"}
    measured = derive.copy_measures(run, "shared", "generator")["coherence"].values
    np.testing.assert_allclose(found["copies of generator"].coherence, measured)


def test_copies_of_one_role_on_two_policies_are_two_groups(tmp_path):
    slots = {f"solver/{number}": "solver" for number in range(4)}
    policies = dict(zip(slots, ("a", "a", "b", "b"), strict=True))
    kappas = {"a": 0.5, "b": -0.5}
    with RunWriter(tmp_path / "run", slots=slots, policies=policies) as writer:
        records = [
            UpdateRecord(
                policy,
                tuple(slot for slot, own in policies.items() if own == policy),
                np.array([[1.0, kappa], [kappa, 1.0]]),
            )
            for policy, kappa in kappas.items()
        ]
        writer.append(1, records)
    snapshot = look(tmp_path / "run", Alarms())
    expected = {f"copies of solver on {policy}": [kappa] for policy, kappa in kappas.items()}
    assert {subject: list(kappa) for subject, kappa in snapshot.coherences.items()} == expected
    assert list(snapshot.norms) == ["solver on a", "solver on b"]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", *map(str, arguments)])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_the_command(tmp_path, capsys, monkeypatch):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        append(writer, 1)
    code, out, err = call(capsys, tmp_path / "run", "--once")
    assert (code, err) == (0, "")
    assert "run: step 1, closed at" in out
    code, out, err = call(capsys, tmp_path / "nothing", "--once")
    assert (code, out, err.count("\n")) == (2, "", 1)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradscope.watch.follow.follow.__kwdefaults__", {"wait": interrupt})
    code, out, err = call(capsys, tmp_path / "run")
    assert (code, err) == (0, "")
    assert "step 1" in out


def test_a_run_without_gradients_shows_what_it_has(tmp_path):
    with RunWriter(tmp_path / "run", slots={"a": "a"}, policies={"a": "p"}) as writer:
        writer.append_evaluation(3, num_correct=1, num_total=2, dataset="d", greedy=True)
    frame = shown(look(tmp_path / "run", Alarms()))
    assert "no step yet" in frame
    assert "d, greedy" in frame
    assert "norm" not in frame
