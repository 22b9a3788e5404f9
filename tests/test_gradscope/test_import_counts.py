"""Evaluations of logs: whose number of problems it is, what is missing, and how replies were sampled."""

import json
import math

import pytest

import gradscope
from gradscope import cli
from gradscope.importers.importing import import_run

GSM, AIME = "val-core/gsm8k/acc/mean@1", "val-core/aime/acc/mean@1"


def imported(tmp_path, rows, **choices):
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"step": s, "data": {"actor/grad_norm": 1.0, **row}}) + "\n" for s, row in rows)
    )
    made = import_run(tmp_path / "log.jsonl", tmp_path / "run.h5", **choices)
    return made, gradscope.open_run(tmp_path / "run.h5")


ROWS = [(step, {GSM: 700 / 1412, AIME: 0.5}) for step in (10, 20)]


def test_one_number_is_not_for_several_data_sets(tmp_path):
    with pytest.raises(
        gradscope.GradscopeError, match=r"2 data sets \(gsm8k, aime\).*--num-total gsm8k=1412"
    ):
        imported(tmp_path, ROWS, num_total=1412)
    with pytest.raises(gradscope.GradscopeError, match=r"unknown data set 'gsm'. Did you mean 'gsm8k'"):
        imported(tmp_path, ROWS, num_total={"gsm": 1412})
    made, run = imported(tmp_path, ROWS, num_total={"gsm8k": 1412, "aime": 30})
    assert run["eval"]["num_correct"].values.tolist() == [700, 15, 700, 15]
    assert run["eval"]["num_total"].values.tolist() == [1412, 30, 1412, 30]
    assert made.num_evaluations == 4


def test_of_several_repeats_the_most_count(tmp_path):
    key = "val-core/gsm8k/acc/mean@{}"
    _, run = imported(tmp_path, [(1, {key.format(8): 0.375, key.format(1): 0.5})], num_total=2)
    assert (run["eval"]["num_correct"].values.tolist(), run["eval"]["num_total"].values.tolist()) == (
        [6],
        [16],
    )


def test_a_data_set_without_a_number_stays_open(tmp_path):
    made, run = imported(tmp_path, ROWS, num_total={"aime": 30})
    assert run["eval"]["dataset"].values.tolist() == ["aime", "aime"]
    assert any(GSM in limit for limit in made.limits)


@pytest.mark.parametrize(("said", "code"), [("aime=30", 0), ("30", 2), ("aime=x", 2), ("aime=-1", 2)])
def test_the_command_takes_numbers_by_data_set(tmp_path, capsys, said, code):
    imported(tmp_path, ROWS)
    log, out = str(tmp_path / "log.jsonl"), str(tmp_path / "out.h5")
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", log, "-o", out, "--num-total", said])
    told = capsys.readouterr()
    assert (ended.value.code or 0, told.err.count("\n")) == (code, min(code, 1))


def test_a_missing_accuracy_is_no_evaluation(tmp_path):
    rows = [(step, {GSM: math.nan if step == 2 else 0.5}) for step in (1, 2, 3)]
    _, run = imported(tmp_path, rows, num_total=4)
    assert run["eval"]["step"].values.tolist() == [1, 3]
    assert run["train"]["step"].values.tolist() == [1, 2, 3]


def test_how_replies_were_sampled_is_not_made_up(tmp_path):
    accuracies = [0.75] * 12 + [0.25] * 12
    rows = [(10 * place, {GSM: accuracy}) for place, accuracy in enumerate(accuracies, 1)]
    _, run = imported(tmp_path, rows, num_total=400)
    assert run["eval"]["greedy"].isnull().all()
    text = str(gradscope.diagnose(run).to_dict())
    assert "'gsm8k'" in text
    assert "sampled" not in text


def test_an_export_keeps_what_is_known_of_sampling(tmp_path):
    from gradscope.exporters.exporting import export_run
    from gradscope.runfile import RunWriter

    with RunWriter(tmp_path / "run", slots={"a": "a"}, policies={"a": "p"}) as writer:
        writer.append(1, metrics={"loss": 1.0})
        for greedy in (None, True, False):
            writer.append_evaluation(1, num_correct=1, num_total=2, dataset="x/y", greedy=greedy)
    export_run(tmp_path / "run", "csv", out=tmp_path / "run.csv")
    import_run(tmp_path / "run.csv", tmp_path / "back.h5")
    back = gradscope.open_run(tmp_path / "back.h5")["eval"]
    assert back["greedy"].fillna(-1).values.tolist() == [-1, 1, 0]
    assert set(back["dataset"].values.tolist()) == {"x/y"}


def test_one_total_for_a_whole_curve(tmp_path):
    (tmp_path / "curve.json").write_text('{"step": [1, 2], "num_correct": [3, 4], "num_total": 9}')
    import_run(tmp_path / "curve.json", tmp_path / "run.h5")
    assert gradscope.open_run(tmp_path / "run.h5")["eval"]["num_total"].values.tolist() == [9, 9]
