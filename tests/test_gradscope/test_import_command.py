"""`gradscope import`: what it prints, and one line with exit code 2 for what cannot be imported."""

import json
import sqlite3
import subprocess
import sys

import pytest

from gradscope import cli


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def lines(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_it_says_what_it_did_and_what_stays_open(tmp_path, capsys):
    rows = [
        {"step": s, "data": {"actor/a/grad_norm": 1.0, "actor/b/grad_norm": 2.0, "x": 1}} for s in range(30)
    ]
    source = lines(tmp_path / "log.jsonl", *rows)
    code, out, err = call(capsys, "import", source, "-o", tmp_path / "run.h5")
    assert (code, err) == (0, "")
    assert "30 steps and 0 evaluations of a, b (format verl, dialect dr_mas)" in out
    assert "1 key(s) that the run file has no place for (x)" in out
    assert "cannot be answered: angles between gradients" in out
    code, out, err = call(capsys, "diagnose", tmp_path / "run.h5")
    assert (code, err) == (0, "")
    assert "angles between gradients" in " ".join(out.split())
    code, out, _ = call(capsys, "list", "importers")
    assert code == 0
    assert "trainer_state.json" in out


def test_a_run_is_not_overwritten(tmp_path, capsys):
    source = lines(tmp_path / "log.jsonl", {"step": 1, "data": {"actor/grad_norm": 1.0}})
    assert call(capsys, "import", source, "-o", tmp_path / "run.h5")[0] == 0
    before = (tmp_path / "run.h5").read_bytes()
    code, _, err = call(capsys, "import", source, "-o", tmp_path / "run.h5")
    assert code == 2
    assert "holds a run already" in err
    assert (tmp_path / "run.h5").read_bytes() == before


def empty_database(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (a)")
    connection.commit()
    connection.close()


BAD = {
    "absent.jsonl": (None, [], "no such file or directory"),
    "unknown.bin": ("\x00\x01", [], "no known format (it holds no text). Name one with --format"),
    "empty.jsonl": ("", ["--format", "verl"], "empty, there is nothing to import"),
    "trainer_state.json": ('{"log_history": []}', [], "log_history is empty"),
    "a.trainer_state.json": ('{"a": 1}', ["--format", "trl"], "has no list 'log_history'"),
    "b.trainer_state.json": ("{", ["--format", "trl"], "not readable as JSON"),
    "c.trainer_state.json": ('{"log_history": [{"loss": 1}]}', ["--format", "trl"], "has no 'step'"),
    "flat.jsonl": ('{"step": 1, "loss": 2}', ["--format", "verl"], "For flat lines use --format jsonl"),
    "broken.jsonl": ('{"step": 1, "data": {}}\nnonsense\nnonsense\n{}', [], "line 2: not JSON"),
    "nosteps.jsonl": ('{"loss": 2, "reward": 1}', [], "no column of steps"),
    "textsteps.csv": ("step,loss\nfirst,1\n", [], "holds no numbers"),
    "nosteps.csv": ("time,loss\n1,2\n", [], "It has time, loss. Name it with --step"),
    "header.csv": ("step,loss\n", [], "empty, there is nothing to import"),
    "halves.csv": ("step,loss\n0.5,2\n", [], "step 0.5 is no whole number"),
    "strange.csv": ("step,foo\n1,2\n", [], "no dialect knows any of its keys (foo)"),
    "many.csv": ("step,run_name,loss\n1,a,2\n1,b,2\n", [], "--where run_name=a"),
    "other.csv": ("step,loss\n1,2\n", ["--where", "x=1"], "no column 'x'"),
    "none.csv": ("step,loss\n1,2\n", ["--where", "loss=1"], "no row matches --where loss=1"),
    "none.jsonl": ('{"step": 1, "data": {"a": 1}}', ["--where", "a=2"], "no row matches --where a=2, there"),
    "none.eval.jsonl": ('{"step": 1, "num_correct": 1, "num_total": 2}', ["--where", "run=b"],
                        "no evaluation matches --where run=b, there"),
    "step.jsonl": ('{"step": 1, "data": {"a": 1}}', ["--step", "a"], "means nothing for verl's file logger"),
    "step.eval.jsonl": ('{"step": 1, "num_correct": 1, "num_total": 2}', ["--step", "a"],
                        "means nothing for files of evaluations; leave it out"),
    "step.trainer_state.json": ('{"log_history": [{"step": 1}]}', ["--step", "a"],
                                "(or 'step:' in the mapping file) means nothing for a Trainer's state"),
    "where.trainer_state.json": ('{"log_history": [{"step": 1}]}', ["--where", "a=1"],
                                 "--where means nothing for a Trainer's state; leave it out"),
    "step.tfevents": ("x", ["--step", "a"], "means nothing for event files; leave it out"),
    "where.tfevents": ("x", ["--where", "a=1"], "--where means nothing for event files; leave it out"),
    "step.db": ("x", ["--step", "a", "--format", "trackio"], "means nothing for trackio's SQLite file"),
    "pair.csv": ("step,loss\n1,2\n", ["--where", "loss"], "expected KEY=VALUE"),
    "column.csv": ("step,loss\n1,2\n", ["--step", "it"], "no column 'it'"),
    "dialect.csv": ("step,loss\n1,2\n", ["--dialect", "vrl"], "unknown dialect 'vrl'. Did you mean"),
    "format.csv": ("step,loss\n1,2\n", ["--format", "cvs"], "unknown importer 'cvs'. Did you mean 'csv'"),
    "pattern.csv": ("step,loss\n1,2\n", ["--role-pattern", "(a"], "no regular expression"),
    "group.csv": ("step,loss\n1,2\n", ["--role-pattern", "a"], "has no group 'role'"),
    "back.csv": ("step,loss\n" + "1,1\n2,1\n3,1\n" * 150, [], "go back more than 100 times"),
    "turned.csv": ("step,loss\n" + "2,1\n1,1\n" * 150, [], "go back 150 times in 300 rows, so these are"),
    "text.parquet": ("no parquet", [], "cannot be read as parquet"),
    "text.db": ("no database", ["--format", "trackio"], "cannot be read as trackio's SQLite file"),
    "run.wandb": ("x", [], "Run 'wandb sync'"),
    "counts.jsonl": ('{"step": 1, "num_correct": 1}', ["--format", "evaluations"], "no 'num_total'"),
    "more.jsonl": ('{"step": 1, "num_correct": 3, "num_total": 2}', [], "3 right of 2 at step 1 cannot be"),
    "uneven.json": ('{"step": [1, 2], "num_correct": [1], "num_total": [2]}', [], "of different lengths"),
    "share.jsonl": ('{"step": 1, "data": {"val-core/x/acc/mean@1": 0.3333}}', ["--num-total", "10"],
                    "which is none of 10 answers"),
    "fraction.jsonl": ('{"step": 1, "data": {"val-core/x/acc/mean@1": 0.5}}', [], "Say the number of"),
    "zero.csv": ("step,loss\n1,2\n", ["--num-total", "0"], "--num-total is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tmp_path, capsys, name):
    content, arguments, complaint = BAD[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    code, out, err = call(capsys, "import", tmp_path / name, "-o", tmp_path / "out.h5", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert complaint in err
    assert not (tmp_path / "out.h5").exists()


def test_folders_and_databases_of_others(tmp_path, capsys):
    empty_database(tmp_path / "other.db")
    code, _, err = call(capsys, "import", tmp_path / "other.db", "-o", tmp_path / "out.h5")
    assert (code, err.count("\n")) == (2, 1)
    assert "no such table: metrics" in err
    (tmp_path / "folder").mkdir()
    code, _, err = call(capsys, "import", tmp_path / "folder", "-o", tmp_path / "out.h5")
    assert (code, err.count("\n")) == (2, 1)
    assert "no known format" in err
    code, _, err = call(
        capsys, "import", tmp_path / "folder", "-o", tmp_path / "out.h5", "--format", "tensorboard"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "no event file" in err


MAPPINGS = {
    "absent": (None, "cannot be read as YAML"),
    "yaml": ("a: [", "cannot be read as YAML"),
    "nothing": ("", "holds nothing, expected sections"),
    "section": ("metric: {loss: l}", "unknown section 'metric'. Did you mean 'metrics'"),
    "metric": ("metrics: {los: l}", "unknown metric 'los'. Did you mean 'loss'"),
    "column": ("metrics: {loss: 3}", "expected a column"),
    "list": ("metrics: [loss]", "expected names and columns"),
    "step": ("step: 3\nmetrics: {loss: l}", "step is 3"),
    "pattern": ("patterns: {'(': loss}", "no regular expression"),
    "evaluation": ("evaluation: {right: r}", "unknown key of evaluation 'right'"),
    "empty": ("policies: {a: b}", "maps no column"),
    "missing": ("metrics: {loss: nowhere}", "names the column 'nowhere', which"),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_bad_mapping_files_are_one_line(tmp_path, capsys, name):
    content, complaint = MAPPINGS[name]
    (tmp_path / "log.csv").write_text("step,loss\n1,2\n")
    if content is not None:
        (tmp_path / "map.yaml").write_text(content)
    code, _, err = call(
        capsys, "import", tmp_path / "log.csv", "-o", tmp_path / "o.h5", "--mapping", tmp_path / "map.yaml"
    )
    assert (code, err.count("\n")) == (2, 1), err
    assert complaint in err


def test_a_missing_package_is_named_with_its_extra(tmp_path):
    (tmp_path / "x.parquet").write_text("x")
    script = (
        "import sys\n"
        "sys.modules['pyarrow'] = None\n"
        "from gradscope import cli\n"
        f"cli.main(['import', {str(tmp_path / 'x.parquet')!r}, '-o', {str(tmp_path / 'run.h5')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "needs the package pyarrow" in done.stderr
    assert ".[importers]" in done.stderr


def test_importing_loads_neither_torch_nor_trackers(tmp_path):
    source = lines(tmp_path / "log.jsonl", *({"step": s, "data": {"actor/grad_norm": 1.0}} for s in range(3)))
    script = (
        "import sys, gradscope\n"
        f"gradscope.import_run({str(source)!r}, {str(tmp_path / 'run.h5')!r})\n"
        "heavy = {'torch', 'tensorboard', 'trackio', 'wandb', 'pyarrow', 'pandas', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr
