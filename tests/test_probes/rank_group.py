"""Runs checks in several gloo processes on loopback: `python rank_group.py WORLD FOLDER MODULE CHECK ...`.

One process imports everything and forks, so that a group costs one import. Each rank writes what came of its
checks to `FOLDER/rank_N.json`. Where a rank fails the group ends: the others would wait for it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

DEADLINE = 240.0
"""Seconds after which a rank shows where it stands and ends itself."""


def main() -> int:
    world, folder, module, *names = sys.argv[1:]
    warnings.simplefilter("error")
    checks = importlib.import_module(module)
    children = [fork(rank, int(world), Path(folder), checks, names) for rank in range(int(world))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(abs(code) for code in codes)


def fork(rank: int, world: int, folder: Path, checks: object, names: list[str]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.dump_traceback_later(DEADLINE, exit=True)
            code = run(rank, world, folder, checks, names)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # never into the parent's loop
    return child


def run(rank: int, world: int, folder: Path, checks: object, names: list[str]) -> int:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    found: dict[str, object] = {}
    try:
        for name in names:
            found[name] = getattr(checks, name)(rank, world)
            distributed.barrier()
    except BaseException:
        found["failure"] = f"rank {rank}, {name}:\n{traceback.format_exc()}"
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    if "failure" not in found:
        distributed.barrier()
        distributed.destroy_process_group()
    return int("failure" in found)


if __name__ == "__main__":
    raise SystemExit(main())
