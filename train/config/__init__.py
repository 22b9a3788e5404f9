"""The configuration of a training run: one tree of frozen values, read from presets, files and overrides."""

from gradscope.train.config.loading import config_from_mapping, load_config, to_yaml
from gradscope.train.config.presets import describe_presets, resolve_layers
from gradscope.train.config.routing import resolve_routing
from gradscope.train.config.sections import Config

__all__ = [
    "Config",
    "config_from_mapping",
    "describe_presets",
    "load_config",
    "resolve_layers",
    "resolve_routing",
    "to_yaml",
]
