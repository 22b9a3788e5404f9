"""Where the parts of a run lie, from a run directory or from the run file itself."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from gradscope.schema import JOURNAL_MARK, METRICS_FILE, RUN_FILE


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run.

    Attributes:
        file: The run file, which exists after the first compaction.
    """

    file: Path

    @classmethod
    def of(cls, path: str | Path) -> RunPaths:
        """Returns the paths of a run given as its directory or as its `.h5` file."""
        path = Path(path)
        return cls(path if path.suffix == ".h5" and not path.is_dir() else path / RUN_FILE)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.file.parent

    @property
    def name(self) -> str:
        """What people call the run: its directory, or a file that is not called as usual."""
        return self.directory.resolve().name if self.file.name == RUN_FILE else self.file.stem

    def temporary(self) -> Path:
        """Returns a name for a new run file until it is whole; no two are the same."""
        return self.file.with_name(f"{self.file.name}.{uuid.uuid4().hex[:12]}.tmp")

    @property
    def lock(self) -> Path:
        """Name of the writer's lock, see `lock.WriterLock`."""
        return self.file.with_name(self.file.name + ".lock")

    @property
    def metrics(self) -> Path:
        """The flat scalar mirror."""
        prefix = "" if self.file.name == RUN_FILE else f"{self.file.stem}."
        return self.directory / f"{prefix}{METRICS_FILE}"

    def journal(self, number: int) -> Path:
        """Returns the path of one journal."""
        return self.file.with_name(f"{self.file.name}{JOURNAL_MARK}{number:06d}")

    def journals(self) -> dict[int, Path]:
        """Returns the journals that exist, by rising number."""
        pattern = re.compile(re.escape(self.file.name + JOURNAL_MARK) + r"(\d+)")
        if not self.directory.is_dir():
            return {}
        matches = ((pattern.fullmatch(path.name), path) for path in self.directory.iterdir())
        return dict(sorted((int(match.group(1)), path) for match, path in matches if match))

    def left_behind(self) -> list[Path]:
        """Returns temporary files that a killed writer did not get to rename."""
        files = self.directory.iterdir()
        return [path for path in files if path.name.startswith(self.file.name) and path.suffix == ".tmp"]

    def exists(self) -> bool:
        """Returns whether a run, or the beginning of one, is there."""
        return self.file.exists() or bool(self.journals())
