"""`gradscope figures`: which files it writes, what it skips and what it refuses."""

import numpy as np
import pytest

from gradscope import cli
from gradscope.figures import FIGURES
from gradscope.runfile import RunWriter, UpdateRecord


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["figures", *map(str, arguments)])
    return stop.value.code


def test_all_figures_are_written_in_three_forms_and_old_ones_replaced(build, tmp_path, capsys):
    paths = [build(layout, 0, num_steps=12)[2] for layout in ("SP", "IP")]
    out = tmp_path / "new" / "folder"
    out.mkdir(parents=True)
    (out / "accuracy.csv").write_text("old")
    assert call(*paths, "-o", out) == 0
    names = {f"{name}.{kind}" for name in FIGURES.names() for kind in ("pdf", "png", "csv")}
    assert {file.name for file in out.iterdir()} == names
    assert (
        (out / "accuracy.csv")
        .read_text()
        .startswith("cell,dataset,evaluated,drawn_as,seed,step,value,low,high,num_runs\n")
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    assert [line.partition(":")[0] for line in captured.out.splitlines()] == FIGURES.names()


def test_a_figure_without_inputs_is_skipped_with_the_reason(build, tmp_path, capsys):
    _, _, path = build("IP", 0, num_steps=3, gradients=False)
    assert call(path, "-o", tmp_path) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"accuracy.pdf", "accuracy.png", "accuracy.csv"}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("gradscope: figure 'gradient_norms' skipped: no run holds gradients")


def test_only_draws_what_was_named(shared, tmp_path):
    assert call(shared[0][2] / "run.h5", "-o", tmp_path, "--only", "alignment") == 0
    assert {file.stem for file in tmp_path.iterdir()} == {"alignment"}


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("shares", "figure 'shares' cannot be drawn: no policy of these runs is shared by two or more roles"),
        ("share", "unknown figure 'share'. Did you mean 'shares'?"),
    ],
)
def test_only_of_what_cannot_be_drawn_is_an_error(only, message, build, tmp_path, capsys):
    _, _, path = build("IP", 0, num_steps=3)
    assert call(path, "-o", tmp_path / "out", "--only", only) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_there_is_one_line(tmp_path, capsys):
    assert call(tmp_path / "nothing", "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "nothing" in error
    assert error.count("\n") == 1


def test_copies_without_products_are_skipped_and_the_rest_is_drawn(tmp_path, capsys):
    slots = {"验/0": "验", "验/1": "验", "b/0": "b"}
    with RunWriter(tmp_path / "run", slots=slots, policies={"验": "p", "b": "q"}) as writer:
        for step in range(1, 9):
            open_gram = UpdateRecord("p", ("验/0", "验/1"), np.full((2, 2), np.nan))
            writer.append(step, [open_gram, UpdateRecord("q", ("b/0",), np.array([[4.0]]))])
    assert call(tmp_path / "run", "-o", tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "figure 'amplification' skipped: copies share a policy, but no products" in captured.err
    assert "Traceback" not in captured.err
    assert "Glyph" not in captured.err
    assert (tmp_path / "out" / "gradient_norms.csv").exists()
