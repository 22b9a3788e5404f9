"""What the README tells a reader to type works, block by block, in order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
# What needs a download or an environment of its own is not run here; the Makefile's targets run this test.
NOT_HERE = ("make ", "pip ")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines if not line.startswith(NOT_HERE)]


def test_the_readme_starts_with_the_two_commands():
    first = blocks("bash")[0].splitlines()
    assert [line.split("#")[0].strip() for line in first] == ["make demo", "make test"]


def test_the_block_for_other_trainers_is_one_short_script_with_five_lines_of_ours():
    section = README.partition("Instrument your own trainer")[2]
    lines = section.partition("```python\n")[2].partition("```")[0].splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert [line.rpartition("# ")[2] for line in lines if line[-1:].isdigit() and "  # " in line] == list(
        "12345"
    )


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    return end.value.code or 0


@pytest.mark.timeout(600)
def test_every_command_and_example_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"question": "What is 1 + 1?", "final_answer": "2"}\n' * 40)
    ran = []
    for words in commands():
        if any("Qwen" in word or "0.6B" in word for word in words):
            continue  # shown with --dry-run; needs weights that are not here
        assert words[0] == "gradscope"
        assert call(*words[1:]) == 0, f"{words}: {capsys.readouterr().err}"
        ran.append(words[1])
    assert {"train", "evaluate", "diagnose", "inspect", "figures"} <= set(ran)
    examples = "\n".join(blocks("python"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", examples], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    for command in ("diagnose", "inspect"):
        capsys.readouterr()
        assert call(command, "runs/mine") == 0
        assert "generator" in capsys.readouterr().out
