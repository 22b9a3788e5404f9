"""Trains multi-agent LLM workflows, records what each role's gradient does, tells why a run broke.

Reading, judging and drawing runs lives here and needs no torch. `gradscope.probes` measures gradients,
`gradscope.train` produces runs, `gradscope.figures` draws them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradscope.detectors.amplification import Amplification as Amplification
    from gradscope.detectors.amplification import find_amplification as find_amplification
    from gradscope.detectors.capture import Capture as Capture
    from gradscope.detectors.capture import find_capture as find_capture
    from gradscope.detectors.cliff import Cliff as Cliff
    from gradscope.detectors.cliff import find_cliff as find_cliff
    from gradscope.diagnosis import Diagnosis as Diagnosis
    from gradscope.diagnosis import Finding as Finding
    from gradscope.diagnosis import diagnose as diagnose
    from gradscope.errors import GradscopeError as GradscopeError
    from gradscope.importers.importing import import_run as import_run
    from gradscope.runfile import RunWriter as RunWriter
    from gradscope.runfile import UpdateRecord as UpdateRecord
    from gradscope.runfile import open_run as open_run
    from gradscope.warner import Warner as Warner

__version__ = "0.1.0"

# Each name is imported when first used, so that writing a run loads no xarray and judging one loads no torch.
_HOMES = {
    "Amplification": "gradscope.detectors.amplification",
    "Capture": "gradscope.detectors.capture",
    "Cliff": "gradscope.detectors.cliff",
    "Diagnosis": "gradscope.diagnosis",
    "Finding": "gradscope.diagnosis",
    "GradscopeError": "gradscope.errors",
    "RunWriter": "gradscope.runfile",
    "UpdateRecord": "gradscope.runfile",
    "Warner": "gradscope.warner",
    "diagnose": "gradscope.diagnosis",
    "find_amplification": "gradscope.detectors.amplification",
    "find_capture": "gradscope.detectors.capture",
    "find_cliff": "gradscope.detectors.cliff",
    "import_run": "gradscope.importers.importing",
    "open_run": "gradscope.runfile",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradscope' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
