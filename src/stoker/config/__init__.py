"""Config files: what a user may write, how it is read, and what it comes to.

Files, in the order of reading:

- `tree.py`       the keys: names, types, ranges, units, defaults, JSON Schema
- `yaml_lines.py` YAML with the line of every key; `Place` and `Problem`
- `shipped.py`    the files that come with stoker, by name
- `load.py`       file + `--set` -> `Config`, or all problems at once; `Config` -> YAML
- `resolve.py`    `Config` -> `Settings`: one value per question, with its reason
"""

from stoker.config.load import check_config, describe_tree, dump_config, load_config, parse_config
from stoker.config.resolve import AugmentationSettings, Settings, resolve
from stoker.config.shipped import find_config, shipped_configs
from stoker.config.tree import Config, config_schema
from stoker.config.yaml_lines import Place, Problem

__all__ = [
    "AugmentationSettings",
    "Config",
    "Place",
    "Problem",
    "Settings",
    "check_config",
    "config_schema",
    "describe_tree",
    "dump_config",
    "find_config",
    "load_config",
    "parse_config",
    "resolve",
    "shipped_configs",
]
