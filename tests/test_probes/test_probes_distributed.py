"""Gradients of slots whose rows are spread over processes, against one process that has all rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Group:
    """Starts a group of gloo processes on loopback, and ends it whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, world: int, *names: str, seconds: float = 280.0) -> list[dict]:
        """Returns what each rank returned of each check; fails with the tracebacks of the ranks."""
        command = [
            sys.executable,
            str(HERE / "rank_group.py"),
            str(world),
            str(self.folder),
            "rank_checks",
            *names,
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        group = subprocess.Popen(
            command, env=environment, start_new_session=True, text=True, stderr=subprocess.PIPE
        )
        try:
            _, errors = group.communicate(timeout=seconds)
        finally:
            if group.poll() is None:
                os.killpg(group.pid, signal.SIGKILL)
                group.communicate()
        files = [self.folder / f"rank_{rank}.json" for rank in range(world)]
        found = [
            json.loads(file.read_text()) if file.exists() else {"failure": "ended early"} for file in files
        ]
        failures = [rank["failure"] for rank in found if "failure" in rank]
        assert not failures, "\n".join([*failures, errors[-4000:]])
        assert group.returncode == 0, errors[-4000:]
        return found


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


def test_two_ranks(group):
    group.check(
        2,
        "ddp_lora_attached_before",
        "ddp_full_attached_after",
        "fsdp_lora_attached_before",
        "fsdp_full_attached_after",
        "summed_per_rank_grams_are_wrong",
        "a_policy_without_rows_on_a_rank",
        "problems_that_stay_on_a_rank",
        "problems_spread_over_ranks",
        "a_failure_on_one_rank_ends_all",
        "nothing_announced_keeps_the_scope",
    )
