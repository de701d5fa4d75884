"""A config file as text that can be changed, resolved and written; used by `--apply`.

Enters: a config file, `--set` overrides, `--store`. Leaves: one YAML text that includes all of them, its resolved
settings, and copies with changed values. Costs a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.address import as_url, masked
from stoker.config import Config, Settings, find_config, load_config, parse_config, resolve
from stoker.config.load import find_key, rewrite_config
from stoker.config.tree import home_of
from stoker.errors import ConfigError, refuse_special
from stoker.ownership import always, never, write_text

_OPTIONS = "recipe.options"


@dataclass(frozen=True)
class JobConfig:
    """The text of a config."""

    text: str  # YAML
    file: str  # name used in messages

    @classmethod
    def read(
        cls, path: str | Path, overrides: Sequence[str] = (), store: str | Path | None = None
    ) -> JobConfig:
        """Read a config and write the overrides into its text.

        Raises:
            ConfigError: The config cannot be read, or is not valid.
        """
        path = find_config(path)
        refuse_special(path, "config", ConfigError)  # it is read twice
        config = load_config(path, overrides)
        written, changes = config.written(), {}
        for key in (override.partition("=")[0].strip() for override in overrides):
            inside = key.removeprefix(f"{_OPTIONS}.")
            changes[key] = written[key] if key in written else written[_OPTIONS][inside]
        if store is not None:
            changes["recipe.store"] = as_url(store) or str(store)
        text = Path(path).read_text(encoding="utf-8-sig")
        return cls(rewrite_config(text, changes, str(path)) if changes else text, str(path))

    @cached_property
    def config(self) -> Config:
        """The parsed text."""
        return parse_config(self.text, self.file)

    @cached_property
    def settings(self) -> Settings:
        """The resolved settings."""
        return resolve(self.config)

    def key_of(self, key: str) -> str:
        """Return the key under which this config sets `key`: options may have several names."""
        return find_key(self.config, home_of(key))

    def deciding(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes under the keys that this config uses; under other names they would be overridden."""
        return {self.key_of(key): value for key, value in changes.items()}

    def with_changes(self, changes: Mapping[str, Any], notes: Sequence[str] = ()) -> JobConfig:
        """Return the config with new values for some dotted keys; `notes` are written on top as comments.

        Raises:
            ConfigError: A value is not allowed, alone or together with the others.
        """
        changed = JobConfig(rewrite_config(self.text, changes, self.file, notes), self.file)
        _ = changed.settings
        return changed

    def write(self, path: Path, *, replace: bool = False) -> None:
        """Write the text to a file, atomically; `replace` allows it to replace any existing file.

        A file whose text holds a password is readable by its owner only.
        """
        has_secret = masked(self.text) != self.text
        write_text(path, self.text, always if replace else never, private=has_secret)
