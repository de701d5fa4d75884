"""A config as a text that can be changed, measured and written: what `--apply` works on.

Enters: a config file, `--set` overrides, `--store`. Leaves: one text that says all of it, the settings it
comes to, and the same with other values. Costs a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.address import as_url, masked
from stoker.config import Config, Settings, find_config, load_config, parse_config, resolve
from stoker.config.rewrite import find_key, rewrite_config
from stoker.config.tree import home_of
from stoker.ownership import always, never, write_text

_OPTIONS = "recipe.options"


@dataclass(frozen=True)
class JobConfig:
    """The text of a config.

    Attributes:
        text: YAML.
        file: Name used in messages.
    """

    text: str
    file: str

    @classmethod
    def read(
        cls, path: str | Path, overrides: Sequence[str] = (), store: str | Path | None = None
    ) -> JobConfig:
        """Read a config, and work in what was typed over it.

        Raises:
            ConfigError: It cannot be read, or is not sound.
        """
        path = find_config(path)
        config = load_config(path, overrides)
        changes = {key: _written(config, key) for key in map(_key_of, overrides)}
        if store is not None:
            changes["recipe.store"] = as_url(store) or str(store)
        text = Path(path).read_text(encoding="utf-8-sig")
        return cls(rewrite_config(text, changes, str(path)) if changes else text, str(path))

    @cached_property
    def config(self) -> Config:
        """What the text says."""
        return parse_config(self.text, self.file)

    @cached_property
    def settings(self) -> Settings:
        """What it comes to."""
        return resolve(self.config)

    def key_of(self, key: str) -> str:
        """Return the place that decides a key here."""
        return find_key(self.config, home_of(key))

    def deciding(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes under the keys that decide here: others would be overruled."""
        return {self.key_of(key): value for key, value in changes.items()}

    def with_changes(self, changes: Mapping[str, Any], notes: Sequence[str] = ()) -> JobConfig:
        """Return the config with some dotted keys at other values; `notes` go on top as comments.

        Raises:
            ConfigError: The values cannot stand, alone or together.
        """
        changed = JobConfig(rewrite_config(self.text, changes, self.file, notes), self.file)
        _ = changed.settings
        return changed

    def write(self, path: Path, *, replace: bool = False) -> None:
        """Write the text as a file, whole or not at all; `replace` takes the place of any file.

        Only its owner may read one with a password.
        """
        has_secret = masked(self.text) != self.text
        write_text(path, self.text, always if replace else never, private=has_secret)


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _written(config: Config, key: str) -> Any:
    written = config.written()
    if key in written:
        return written[key]
    return written[_OPTIONS][key.removeprefix(f"{_OPTIONS}.")]
