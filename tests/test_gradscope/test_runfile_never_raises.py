"""No data that a training loop hands in stops it: what cannot be stored is left out, said once."""

import json
import warnings

import numpy as np
import pytest

from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"g/0": "g", "g/1": "g"}
POLICIES = {"g": "p"}
NAMES = tuple(SLOTS)


class Odd:
    """Neither number nor text, and no help in becoming one."""

    def __float__(self):
        raise ValueError("odd")


def record(**fields):
    return UpdateRecord("p", NAMES, **({"gram": np.eye(2)} | fields))


APPENDS = {
    "a count beyond its type": {"record": record(counts={"num_rows": np.array([1e30, 3.0])})},
    "a flag beyond its type": {"record": record(scalars={"skipped": 300})},
    "a total of one's own": {"record": record(counts={"my_total": 3.0})},
    "counts of one's own too few": {"record": record(counts={"mine": [1.0]})},
    "counts that are an object": {"record": record(counts={"mine": Odd(), "num_rows": Odd()})},
    "a ragged gram": {"record": record(gram=[[1.0], [1.0, 2.0]])},
    "no gram": {"record": record(gram=None)},
    "an odd residual": {"record": record(attribution_residual=Odd())},
    "an odd scalar": {"record": record(scalars={"grad_norm": Odd(), "mine": Odd(), "list": [1, [2]]})},
    "a negative and an infinite count": {"record": record(counts={"num_rows": np.array([-np.inf, -7.0])})},
    "huge by slot": {"metrics": {"num_tokens": {"g/0": 1e300, "g/1": 5}}},
    "odd by slot": {"metrics": {"reward_mean": {"g/0": Odd(), "g/1": 1.0}}},
    "odd by phase": {"metrics": {"seconds": {"a": Odd(), "b": [1, 2]}}},
    "ragged": {"metrics": {"loss": [[1], [2, 3]], "mine": [[1], [2, 3]]}},
    "numbers as names": {"metrics": {3: 1.0, "mine": {4: 2.0, None: 3.0}}},
    "complex": {"metrics": {"loss": 1j, "mine": 1j}},
    "an integer beyond floats": {"metrics": {"loss": 10**400, "num_updates": 10**400, "mine": 10**400}},
    "an update count beyond its type": {"metrics": {"num_updates": 1e25}},
}


@pytest.mark.parametrize("name", APPENDS)
def test_append_never_raises_mid_run(tmp_path, name):
    given = APPENDS[name]
    run = written(tmp_path, lambda writer, step: writer.append(step, **given))
    assert run["train"]["step"].values.tolist() == [0, 1, 2]
    assert run["updates"]["step"].values.tolist()[-1] == 2


ROWS = {
    "a numpy update": {"update": np.int64(3)},
    "an update of numpy in an array": {"update": np.array(3)},
    "an odd update": {"update": Odd()},
    "a ragged sketch": {"sketch": [[1.0, 2.0], [3.0]]},
    "an odd sketch": {"sketch": Odd()},
    "a column that is a number": {"grad_norm": 3.0},
    "a column of odd values": {"grad_norm": [Odd(), "x"], "num_tokens": [1e30, None]},
    "a column that is none": {"slot": 3},
    "nested": {"advantage": [[1.0], [2.0, 3.0]]},
}


@pytest.mark.parametrize("name", ROWS)
def test_append_rows_never_raises_mid_run(tmp_path, name):
    run = written(tmp_path, lambda writer, step: writer.append_rows(step, row_id=["a", "b"], **ROWS[name]))
    assert run["rows"]["row_id"].values.tolist() == ["a", "b"] * 2


EVALUATIONS = {
    "a count beyond its type": {"num_correct": 1e30},
    "odd counts": {"num_correct": Odd(), "num_total": "ten"},
    "an odd flag": {"greedy": None, "temperature": Odd()},
    "a flag that is text": {"greedy": "yes"},
    "a list by role": {"role_accuracy": [0.5], "role_tokens_mean": 3.0},
    "odd by role": {"role_accuracy": {"g": Odd(), 3: 1.0}},
    "an odd name": {"dataset": None},
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_append_evaluation_never_raises_mid_run(tmp_path, name):
    given = {"num_correct": 1, "num_total": 2, "dataset": "d"} | EVALUATIONS[name]
    run = written(tmp_path, lambda writer, step: writer.append_evaluation(step, **given))
    assert run["eval"]["step"].values.tolist() == [0, 1]


OTHERS = {
    "an event of no kind": lambda writer, step: writer.append_event(step, None, Odd()),
    "modules without shape": lambda writer, step: writer.append_modules(
        step, slots=NAMES, modules=["m"], grad_norm=[[1.0], [2.0, 3.0]], update=np.int64(1)
    ),
    "modules of an odd update": lambda writer, step: writer.append_modules(
        step, slots=NAMES, modules=["m"], gram=Odd(), update=Odd()
    ),
    "rows without ids": lambda writer, step: writer.append_rows(step, row_id=None),
    "no rows": lambda writer, step: writer.append_rows(step, row_id=[], update=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_raises_mid_run(tmp_path, name):
    written(tmp_path, OTHERS[name])


def written(path, append):
    """Appends the odd data twice between plain steps; warns the first time only, by UserWarning."""
    with RunWriter(path, slots=SLOTS, policies=POLICIES) as writer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            append(writer, 0)
        assert {warning.category for warning in caught} <= {UserWarning}
        assert len({str(warning.message) for warning in caught}) == len(caught)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            append(writer, 1)
        writer.append(2, record())
    return open_run(path)


def warned(path, *, match, **given):
    with (
        RunWriter(path, slots=SLOTS, policies=POLICIES) as writer,
        pytest.warns(UserWarning, match=match),
    ):
        writer.append(0, **given)
    return open_run(path)


def test_a_number_beyond_its_type_is_left_out_and_said(tmp_path):
    counts = {"num_rows": np.array([1e30, 3.0])}
    run = warned(tmp_path, record=record(counts=counts), match="'num_rows' holds numbers beyond i8")
    np.testing.assert_array_equal(run["updates"]["num_rows"][0], [np.nan, 3])


def test_a_total_of_ones_own_is_kept(tmp_path):
    run = warned(tmp_path, record=record(counts={"my_total": 3.0}), match="'my_total' is not in the schema")
    assert run["user"]["my_total"].values.tolist() == [3.0]


def test_a_numpy_update_number_is_kept(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append_rows(0, row_id=["a", "b"], update=np.int64(3))
    assert open_run(tmp_path)["rows"]["update"].values.tolist() == [3, 3]


def test_a_step_that_no_file_can_hold_is_refused(tmp_path):
    with (
        RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer,
        pytest.raises(ValueError, match="step 9223372036854775808 is beyond"),
    ):
        writer.append(2**63)


FOREIGN = ["[1, 2]", "null", '{"step": "x"}', '{"loss": 1}', "3", '{"step": null}', '{"step": NaN}']


def test_foreign_lines_of_the_mirror_survive_a_resume_and_are_told_of(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        for step in range(3):
            writer.append(step)
    path = tmp_path / "metrics.jsonl"
    ours = path.read_text().splitlines()
    path.write_bytes("\n".join([ours[0], *FOREIGN, *ours[1:]]).encode() + b'\n{"step": 0, "torn\xff')
    writer = RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=1)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: 7 lines are no training step; they are kept"):
        writer.append(2)
    writer.close()
    lines = path.read_text().splitlines()
    assert lines[:-1] == [ours[0], *FOREIGN, ours[1]]
    assert json.loads(lines[-1])["step"] == 2
