"""Gradients of slots whose rows are spread over processes, against one process that has all rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gradscope import open_run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks of a group are forks")

HERE = Path(__file__).parent
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
ENVIRONMENT = os.environ | LOOPBACK | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


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
        group = subprocess.Popen(
            command, env=ENVIRONMENT, start_new_session=True, text=True, stderr=subprocess.PIPE
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


TWO_RANKS = (
    "ddp_lora_attached_before",
    "fsdp_full_attached_after",
    "fsdp_full_attached_to_shards",
    "evidence_of_modules_and_rows",
    "fused_layers",
    "pure_micro_batches",
    "other_ways_to_shard",
    "summed_per_rank_grams_are_wrong",
    "a_policy_without_rows_on_a_rank",
    "problems_that_stay_on_a_rank",
    "problems_spread_over_ranks",
    "a_failure_on_one_rank_ends_all",
    "work_that_fails_on_one_rank",
    "nothing_announced_keeps_the_scope",
    "ways_that_are_refused",
    "verification",
    "pieces_in_windows",
    "one_rank_writes",
    "momenta_in_checkpoints",
)


def test_two_ranks(group):
    group.check(2, *TWO_RANKS)


@pytest.mark.slow
def test_two_ranks_in_other_ways(group):
    group.check(2, "ddp_full_attached_after", "fsdp_lora_attached_before")


def test_four_ranks(group):
    group.check(4, "hybrid_shards")


@pytest.mark.slow
def test_four_ranks_with_all_weights(group):
    group.check(4, "ddp_full_attached_after", "fsdp_full_attached_to_shards")


@pytest.mark.slow
def test_four_ranks_in_other_ways(group):
    group.check(
        4,
        "ddp_lora_attached_before",
        "fsdp_lora_attached_before",
        "fsdp_full_attached_after",
        "fused_layers",
        "other_ways_to_shard",
        "a_failure_on_one_rank_ends_all",
        "work_that_fails_on_one_rank",
        "pieces_in_windows",
    )


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_torchrun(root, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = root / "examples" / "instrument_ddp.py"
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [*command, str(script), str(tmp_path / "run")], env=environment, check=True, timeout=600, cwd=root
    )
    updates = open_run(tmp_path / "run")["updates"]
    assert updates["step"].values.tolist() == [1, 2, 3, 4]
    assert (updates["num_rows"].values == 8).all()
    assert np.isfinite(updates["gram"].values).all()
    assert np.isfinite(updates["gram_cross"].values).all()
    assert (updates["attribution_residual"].values < 1e-4).all()
