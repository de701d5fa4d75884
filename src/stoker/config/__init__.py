"""Config files: the options that may be written, how a file is read, and the settings it results in.

Files, in the order of reading:

- `options.py`    the options of every room: names, other names, types, ranges, units, defaults, meaning
- `tree.py`       the sections and keys of a file, made from them; JSON Schema
- `yaml_lines.py` YAML with the line of every key; `Place` and `Problem`
- `load.py`       file + `--set` -> `Config`, or all problems at once; `Config` -> YAML
- `resolve.py`    `Config` -> `Settings`: the options filled, each with its reason
"""

from stoker.config.load import (
    check_config,
    describe_tree,
    dump_config,
    find_config,
    load_config,
    parse_config,
    shipped_configs,
)
from stoker.config.options import AugmentOptions, JobOptions, LoadingOptions, TrainOptions
from stoker.config.resolve import Settings, resolve
from stoker.config.tree import Config, config_schema
from stoker.config.yaml_lines import Place, Problem

AugmentationSettings = AugmentOptions  # its former name

__all__ = [
    "AugmentOptions", "AugmentationSettings", "Config", "JobOptions", "LoadingOptions", "Place",
    "Problem", "Settings", "TrainOptions", "check_config", "config_schema", "describe_tree",
    "dump_config", "find_config", "load_config", "parse_config", "resolve", "shipped_configs",
]  # fmt: skip
