"""What the README tells a reader to type works, block by block, in order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.timeout(240)
def test_every_command_and_example_works(tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"question": "What is 1 + 1?", "final_answer": "2"}\n' * 40)
    ran = []
    for words in commands():
        if any("Qwen" in word or "0.6B" in word for word in words):
            continue  # shown with --dry-run; needs weights that are not here
        assert words[0] == "gradscope"
        done = subprocess.run(
            [sys.executable, "-m", "gradscope", *words[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        ran.append(words[1])
    assert {"train", "evaluate", "diagnose", "inspect", "figures"} <= set(ran)
    examples = "\n".join(blocks("python"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", examples], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mine" / "run.h5").is_file()
