"""The command line: exit codes, one-line errors, and commands that answer without a run."""

import json
import subprocess
import sys

import pytest

from gradscope import cli
from gradscope.errors import DataError, GradscopeError


def call(*arguments, cwd=None):
    command = [sys.executable, "-m", "gradscope", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diagnos", "x"], "no command 'diagnos'. Did you mean 'diagnose'?"),
        (["list", "workflow"], "unknown kind 'workflow'. Did you mean 'workflows'?"),
        (["list"], "Missing argument"),
        (["list", "tasks", "--jsn"], "No such option: --jsn"),
    ],
)
def test_wrong_words_get_one_line_and_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradscope: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_our_errors_are_one_line_and_bugs_show_their_traceback(monkeypatch, capsys):
    import gradscope.commands.list as command

    def fail_as_user(kind):
        raise DataError("x.jsonl line 3:\n no field 'question'")

    monkeypatch.setattr(command, "_describe", fail_as_user)
    with pytest.raises(SystemExit) as stop:
        cli.main(["list", "tasks"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "gradscope: x.jsonl line 3: no field 'question'\n"

    def fail_as_bug(kind):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(command, "_describe", fail_as_bug)
    with pytest.raises(SystemExit) as stop:
        cli.main(["list", "tasks"])
    assert stop.value.code == 3
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "this is a bug in gradscope" in error


def test_an_optional_package_that_is_not_there_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "gradscope.train.evaluate", raising=False)
    monkeypatch.delitem(sys.modules, "gradscope.train.session", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate", "runs/x"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "gradscope: this command needs the package torch, which is not installed. "
        "Run 'pip install \".[train]\"' in the source folder of gradscope.\n"
    )


def test_without_words_it_explains_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradscope"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert "Usage: gradscope" in capsys.readouterr().out


def test_every_error_of_ours_is_also_a_builtin_one():
    import gradscope.errors as errors

    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = [kind for kind in kinds if issubclass(kind, GradscopeError) and kind is not GradscopeError]
    assert len(ours) >= 6
    for kind in ours:
        assert len(kind.__bases__) == 2, f"{kind.__name__} specialises no builtin error"
        assert str(kind("a 'quoted' message")) == "a 'quoted' message"


def test_every_command_exists_and_explains_itself(capsys):
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        assert told.startswith(f"Usage: gradscope {name}")  # plain, as the help of the whole is
        assert "\nOptions:\n" in told


def test_version_and_list(capsys):
    import gradscope

    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"gradscope {gradscope.__version__}\n"
    for kind in ("presets", "workflows", "tasks", "detectors", "figures"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["list", kind, "--json"])
        assert stop.value.code == 0
        described = json.loads(capsys.readouterr().out)
        assert described
        assert all(described.values()), described


def test_module_form_works_and_a_closed_pipe_is_no_bug():
    assert call("--version").returncode == 0
    command = f"{sys.executable} -m gradscope list tasks | true"
    assert subprocess.run(command, shell=True, capture_output=True, text=True).stderr == ""
