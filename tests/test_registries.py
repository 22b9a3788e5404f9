"""Every plug-in table keeps the same contract: the name is the file, the file has a docstring, it loads."""

import importlib
import sys
import types
from pathlib import Path

import pytest

from gradscope.errors import UnknownNameError
from gradscope.registry import Registry

TABLES = {
    "detector": "gradscope.detectors:DETECTORS",
    "workflow": "gradscope.train.workflows:WORKFLOWS",
    "task": "gradscope.train.tasks:TASKS",
    "figure": "gradscope.figures:FIGURES",
    "importer": "gradscope.importers:IMPORTERS",
    "dialect": "gradscope.importers.dialects:DIALECTS",
    "exporter": "gradscope.exporters:EXPORTERS",
}


def load(target: str) -> Registry:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(params=TABLES)
def registry(request) -> Registry:
    table = load(TABLES[request.param])
    assert table.kind == request.param
    return table


def test_names_equal_their_files(registry):
    assert registry.names()
    for name in registry.names():
        module = registry.target(name).partition(":")[0]
        assert module.rpartition(".")[2] == name
        assert Path(importlib.import_module(module).__file__).stem == name


def test_every_plugin_loads_and_says_what_it_is(registry):
    for name, line in registry.describe().items():
        assert len(line) > 10, f"{registry.kind} {name} has no first docstring line"


def test_an_unknown_name_gets_the_nearest_one(registry):
    name = registry.names()[0]
    with pytest.raises(UnknownNameError, match=f"unknown {registry.kind} '{name}x'. Did you mean '{name}'"):
        registry.get(f"{name}x")


def test_a_plugin_from_elsewhere_needs_no_edit_here(registry, monkeypatch):
    module = types.ModuleType("somebody_elses_module")
    module.Plugin = object()
    monkeypatch.setitem(sys.modules, "somebody_elses_module", module)
    assert registry.get("somebody_elses_module:Plugin") is module.Plugin
    with pytest.raises(UnknownNameError, match="has no attribute 'Missing'"):
        registry.get("somebody_elses_module:Missing")
    with pytest.raises(UnknownNameError, match="there is no module 'not_a_module'"):
        registry.get("not_a_module:Plugin")
