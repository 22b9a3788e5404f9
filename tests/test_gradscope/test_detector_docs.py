"""docs/detectors.md, the sentences of the detectors and the benchmark that measures them agree."""

import re
import runpy
from pathlib import Path

import pytest

from gradscope.detectors import amplification, capture, capture_words, cliff
from gradscope.stats import permutation, two_window
from gradscope.warner import WarnerSettings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "detectors.md").read_text()


def tables(text):
    """Title to row name to the row's rates in per cent."""
    found = {}
    for title, table in re.findall(
        r"^((?:Cliff|Capture|Amplification|Warner): .+)\n\n((?:\|.+\n?)+)", text, re.M
    ):
        rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
        found[title] = {name: [float(cell.removesuffix(" %")) for cell in cells] for name, *cells in rows[2:]}
    return found


def test_the_tables_are_those_that_the_benchmark_prints(capsys):
    runpy.run_path(str(ROOT / "tests" / "benchmarks" / "false_alarms.py"))["main"](["--runs", "4"])
    printed, written = tables(capsys.readouterr().out), tables(TEXT)
    assert len(printed) == 5
    assert {title: list(rows) for title, rows in printed.items()} == {
        title: list(rows) for title, rows in written.items()
    }


def words(rate):
    return f"{rate:.0f} %" if rate >= 1 else f"{rate:.1f} %"


def test_the_rates_that_findings_quote_are_in_the_tables():
    written = tables(TEXT)
    curves = written["Cliff: score above"]
    assert f"{words(curves['all without'][1])} of simulated curves" in cliff.FALSE_ALARMS
    assert f"{words(curves['all without, 30 problems'][1])} of those with 30" in cliff.FALSE_ALARMS
    runs = written["Capture: verdict"]
    quoted = capture_words.FALSE_ALARMS
    assert f"{words(runs['all without'][0])} of simulated runs" in quoted["capture"]
    assert f"{words(runs['drift'][0])} of those whose replies drift" in quoted["capture"]
    assert f"{words(runs['healthy'][1])} of simulated runs" in quoted["dominance"]
    assert f"{words(runs['noisy'][1])} of those with noisy steps" in quoted["dominance"]
    assert f"{words(runs['all without'][2])} of simulated runs" in quoted["possible"]
    copies = written["Amplification: verdict"]["all without"]
    assert f"{words(copies[0])} of simulated runs" in amplification.FALSE_ALARMS["amplification"]
    assert f"{words(copies[1])} of simulated runs" in amplification.FALSE_ALARMS["possible"]


@pytest.mark.parametrize(
    "quoted",
    [
        f"| above {cliff.STRONG:g} | strong |",
        f"| above {cliff.FOUND:g} | cliff |",
        f"| above {cliff.POSSIBLE:g} | possible |",
        f"The margin is {cliff.MARGIN:g}",
        f"w in {{{', '.join(map(str, two_window.WIDTHS))}}}",
        f"c >= max(w, {two_window.EARLIEST:g} T)",
        f"logit m_k(base)] / {capture.SHARE_UNIT:g}",
        f"gap(base)] / {capture.ALIGNMENT_UNIT:g}",
        f"|d log tokens_k|) / {capture.LENGTH_UNIT:g}, d violation_R / {capture.VIOLATION_UNIT:.2f}",
        f"| at least {capture.CAPTURE:g} | capture |",
        f"| at least {capture.POSSIBLE:g} | possible |",
        f"Capture needs chance <= {capture.SURE_CAPTURE:g}, dominance <= {capture.SURE_DOMINANCE:g}, "
        f"possible <= {capture.SURE_POSSIBLE:g}.",
        f"chance <= {amplification.SURE:g} for amplification, "
        f"<= {amplification.SURE_POSSIBLE:g} for possible",
        f"in {permutation.NUM_ORDERS} orders of the steps",
        f"at least {permutation.BLOCK} steps",
        f"kappa(base)] / {amplification.COHERENCE_UNIT:g}, [ell(final) - ell(base)] / "
        f"{amplification.SIZE_UNIT:g}",
        f"| at least {amplification.FOUND:g} | amplification |",
        f"| at least {amplification.POSSIBLE:g} | possible |",
        f"while both averages exceed {WarnerSettings().threshold:g}",
    ],
)
def test_thresholds_are_those_of_the_code(quoted):
    assert quoted in TEXT


def test_sources_refer_to_no_page_that_is_not_there():
    for folder in ("gradscope", "probes", "train", "figures", "tests/benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            for page in re.findall(r"\b(?:docs|reference)/[\w/]+\.md", source):
                assert (ROOT / page).is_file(), f"{path}: {page}"
            assert "design, section" not in source, path
