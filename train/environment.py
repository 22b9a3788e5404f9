"""What a run ran on and with, for `environment.json`."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime

import torch

from gradscope.runfile import provenance


def describe_environment(device: torch.device) -> dict[str, object]:
    """Returns code, packages, machine and command of this process."""
    cores = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    on_cuda = device.type == "cuda"
    attributes = provenance.root_attributes(None, None, None)
    return {
        "gradscope_version": attributes["gradscope_version"],
        "git_hash": attributes["git_hash"],
        "python": platform.python_version(),
        "packages": json.loads(attributes["packages_json"]),
        "hardware": f"{torch.cuda.get_device_name(device)}; {cores}" if on_cuda else cores,
        "platform": platform.platform(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
