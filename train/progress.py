"""Shows a run going on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradscope.train.report import StepReport

BAR_WIDTH = 20
FACTS_WIDTH = 82
"""Columns that counts, facts and remaining time take at most."""


class RunProgress:
    """An `on_step` callback that prints; a context manager.

    Args:
        title: What is being trained.
        print_every: Steps between lines where there is no terminal.
        console: Where to print; standard error by default, so that standard output stays for results.
    """

    def __init__(self, title: str, *, print_every: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.title = title
        self.print_every = print_every
        self.accuracy = math.nan
        self.live = self._make_live() if self.console.is_terminal else None
        self._task = None if self.live is None else self.live.add_task(title, total=None, facts="")
        self._seconds, self._tokens = 0.0, 0
        self._last = time.perf_counter()

    def __enter__(self) -> RunProgress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, report: StepReport) -> None:
        """Shows one step."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        self._tokens += report.num_tokens
        for evaluation in report.evaluations:
            if not evaluation.greedy or len(report.evaluations) == 1:
                self.accuracy = evaluation.accuracy
            self.console.print(f"step {report.step}: {evaluation.describe()}", markup=False)
        for kind, message in report.events:
            self.console.print(f"step {report.step}: {kind}: {message}", markup=False)
        if report.step and report.metrics and (self.live is not None or self._is_due(report)):
            facts = self._facts(report)
            if self.live is not None and self._task is not None:
                self.live.update(self._task, completed=report.step, total=report.num_steps, facts=facts)
            else:
                self.console.print(f"step {report.step}/{report.num_steps}: {facts}", markup=False)

    def _is_due(self, report: StepReport) -> bool:
        return report.step % self.print_every == 0 or report.step == report.num_steps

    def _facts(self, report: StepReport) -> str:
        """Returns reward, accuracy, speed since the last line, and what the probe's calls took."""
        seconds = report.metrics.get("seconds")
        phases = seconds if isinstance(seconds, Mapping) else {}
        busy = sum(phases.values())
        share = phases.get("probes", 0.0) / busy if busy else 0.0
        speed = self._tokens / self._seconds if self._seconds else 0.0
        self._seconds, self._tokens = 0.0, 0
        accuracy = "" if math.isnan(self.accuracy) else f", accuracy {self.accuracy:.3f}"
        reward = report.metrics.get("episode_reward_mean", math.nan)
        return f"reward {reward:.3f}{accuracy}, {speed:.0f} tokens/s, probes {share:.1%}"

    def _make_live(self) -> Progress:
        # The facts come first: a narrow terminal goes without the bar, then without the name.
        room = self.console.width - FACTS_WIDTH - len(self.title)
        name = [TextColumn("{task.description}", markup=False)] if room > 0 else []
        bar = [BarColumn(bar_width=BAR_WIDTH)] if room > BAR_WIDTH else []
        return Progress(
            *name,
            *bar,
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=self.console,
            transient=False,
        )
