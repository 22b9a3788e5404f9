"""Builds the new run file of a compaction in a process of its own, so that training never waits for it.

HDF5 and its compression hold the interpreter's lock for milliseconds at a time. The child only writes the new
file; giving it its name and deleting journals stays with the writer, so a child that outlives its writer
changes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from gradscope.errors import RunFileError
from gradscope.runfile import child
from gradscope.runfile.compaction import Task, build
from gradscope.runfile.durable import remove

WORTH_A_CHILD = 262_144
"""Bytes from which a compaction goes to a child; below, all of it takes less than starting one."""

_FAILED = 7
"""Exit code of a child that says why on its standard output."""


class ChildError(RuntimeError):
    """A child that could not be started, or died."""


def build_in_child(task: Task, target: Path) -> int:
    """Does what `compaction.build` does, in a child.

    Raises:
        OSError: As `build` has it.
        ChildError: The child could not do its work; nothing is wrong with the run.
    """
    own = {**asdict(task), "file": str(task.file.absolute())}
    try:
        done = subprocess.run(
            child.command(),
            input=child.order(__name__, task=own, target=str(target.absolute())),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C asks the training to stop, not its log
        )
    except OSError as error:
        raise ChildError(f"cannot be started: {error}") from error
    if done.returncode == 0:
        return int(done.stdout)
    remove(target)
    if done.returncode == _FAILED:
        number, message = json.loads(done.stdout)
        raise RunFileError(message) if number is None else OSError(number, message)
    raise ChildError(" ".join(done.stderr.split())[-500:] or f"exit code {done.returncode}")


def main(order: dict[str, object]) -> None:
    """Is the child: builds what is ordered, prints how many records are missing."""
    os.nice(5)
    task = dict(order["task"])  # type: ignore[call-overload]
    try:
        num_missing = build(Task(**{**task, "file": Path(task["file"])}), Path(str(order["target"])))
    except OSError as error:
        print(json.dumps([error.errno, error.strerror or str(error)]))
        sys.exit(_FAILED)
    print(num_missing)
