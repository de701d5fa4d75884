"""Resolve a config to settings: one value per key, with its reason.

Enters: a `Config`. Leaves: frozen `Settings`: the models of `options.py`, filled. Every value names the key and
line it comes from, and every written key that lost, or that a job does not read, is a note. Costs
microseconds; pure.

Precedence when several sections write the same key (docs/config.md says why): `--set` before the file, then the
most specific section, by `options.SECTION_RANKS`. Two names in one section that disagree are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from stoker.arguments import explained
from stoker.config.options import (
    FORMER,
    LAYOUTS,
    LAZY,
    SECTION_RANKS,
    AugmentOptions,
    JobOptions,
    LoadingOptions,
    RecipeOptions,
    RunOptions,
)
from stoker.config.tree import ROOMS, Config, default_of
from stoker.config.yaml_lines import Place, Problem
from stoker.errors import ConfigError, InputError
from stoker.strict_json import exact_text

AUGMENT = "gpu_augmentation"
OPTIONS = "recipe.options"


def _rank(key: str) -> int:
    section = key.rpartition(".")[0]
    return SECTION_RANKS.index(section) if section in SECTION_RANKS else 0


PLACES: Mapping[str, tuple[str, ...]] = {
    home: tuple(
        sorted((home, *(other for other, meant in LAYOUTS.items() if meant == home)), key=_rank)
    )
    for section, model in ROOMS.items()
    for home in (f"{section}.{entry.name}" for entry in fields(model))
}
"""Every key of the models, and where a file may write it, the most specific place first."""

_SWITCH = f"{LAZY}.enabled"
_FULL = ("fp32", "tf32")
# Keys that `stoker train` never reads, and why. A user's own program may read them.
_STORE_IS_READ = "the packed store is read when samples are needed, and needs no cache of its own"
UNREAD: Mapping[str, str] = {
    "data.num_workers": "the store is read by threads of the training process, as many as the machine allows",
    "data.prefetch_factor": "there are no worker processes: the loader fills its own slots ahead",
    "data.persistent_workers": "there are no worker processes",
    "data.pin_memory": "batches always go through pinned memory on their way to a GPU",
    "data.use_lazy_loading": _STORE_IS_READ,
    "data.lazy_cache_dir": _STORE_IS_READ,
    "data.precompute_graphs": "graphs are packed into the store and expanded on the device",
}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from."""

    key: str = ""  # dotted key or command option that sets the value; "" for a default
    place: Place | None = None  # where that key is written, if it is known
    default: str = "default"  # which default it is; used only if `key` is ""

    def __str__(self) -> str:
        """Format as `key (file:line:column)`, or name the default that was used."""
        if not self.key:
            return self.default
        return f"{self.key} ({self.place})" if self.place else self.key


RECIPE_DEFAULT = "the recipe's default"


@dataclass(frozen=True)
class Settings:
    """The options of all sections with their values. `settings.training.lr` is the key `training.lr`.

    Attributes:
        recipe: Which job, on which data.
        data: Loading. `prefetch_factor` is None exactly when there are no workers.
        training: The training step and the job around it. `use_amp` is always what `precision` comes to.
        gpu_augmentation: What to draw, if `training.use_gpu_augmentation` is on; see `augmentation`.
        run: Where a run keeps its files.
        origins: Per key, and per "recipe.options.<name>", where its value comes from.
        notes: Written keys that have no effect, and why.
    """

    recipe: RecipeOptions
    data: LoadingOptions
    training: JobOptions
    gpu_augmentation: AugmentOptions
    run: RunOptions
    origins: Mapping[str, Origin] = field(compare=False, repr=False)
    notes: tuple[str, ...] = field(compare=False)

    @property
    def augmentation(self) -> AugmentOptions | None:
        """What to draw per sample, or None for no augmentation on the GPU."""
        return self.gpu_augmentation if self.training.use_gpu_augmentation else None

    @property
    def reasons(self) -> dict[str, str]:
        """The origins in words."""
        return {key: str(origin) for key, origin in self.origins.items()}

    def is_default(self, key: str) -> bool:
        """Whether this key was not written; a plan or a tuner may then choose a better value."""
        return not self.origins[as_key(key)].key

    def get(self, key: str) -> Any:
        """Return the value of a dotted key."""
        section, _, name = as_key(key).partition(".")
        return getattr(getattr(self, section), name)

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """Return settings in which some dotted keys have other values, checked as in a file."""
        made = self
        for key, value in changes.items():
            section, _, name = key.partition(".")
            made = replace(made, **{section: replace(getattr(made, section), **{name: value})})
        return made

    def told(self, key: str, value: Any, option: str) -> Settings:
        """Return settings with one key set by an option of the command line, such as `--store`."""
        return replace(self.changed({key: value}), origins={**self.origins, key: Origin(option)})

    def with_recipe_defaults(self, defaults: Mapping[str, tuple[Any, str]]) -> Settings:
        """Return settings with a recipe's defaults (dotted key to value and reason) for the keys that were not written.

        A key that has a recipe's default already keeps its value: a tuner may have changed it since.
        """
        free = {key: each for key, each in defaults.items() if self.origins[key] == Origin()}
        made = self.changed({key: value for key, (value, _) in free.items()})
        origins = {
            key: Origin(default=f"{RECIPE_DEFAULT}, {why}") for key, (_, why) in free.items()
        }
        return replace(made, origins={**self.origins, **origins})

    def values(self) -> dict[str, Any]:
        """Return every value by its dotted key; those of augmentation only where it is on."""
        is_off = self.augmentation is None
        return {
            key: self.get(key)
            for key in PLACES
            if not (is_off and key.partition(".")[0] == AUGMENT)
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document: settings with reasons, and the notes."""
        reasons = self.reasons
        rows = {
            key: {"value": value, "reason": reasons[key]} for key, value in self.values().items()
        }
        return {"settings": rows, "notes": list(self.notes)}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a value by its name from the time before settings had sections."""
            key = as_key(name)
            if key == name:
                raise AttributeError(f"'Settings' object has no attribute {name!r}")
            return self.get(key)


_FLAT_NAMES = {key.rpartition(".")[2]: key for key in PLACES if key not in ("run.dir", OPTIONS)}
_FLAT_NAMES |= {"chunk_bytes": "data.chunk_bytes", **FORMER}
_FLAT_NAMES["samples_per_update"] = "training.samples_per_update"


def as_key(name: str) -> str:
    """Return the dotted key of a name: of a key without its section, or of a former name."""
    return _FLAT_NAMES.get(name, name)


@dataclass
class _Answers:
    """The work of one resolve: written keys in; values, origins, notes and clashes out.

    `unused` has the written keys that lost against another one, or against a switch, and why.
    """

    config: Config
    written: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    winners: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    clashes: list[tuple[frozenset[str], Problem]] = field(default_factory=list)

    def say(self, key: str) -> str:
        """Return `key: value (place)` for messages."""
        place = self.config.place_of(key)
        return f"{key}: {exact_text(self.written[key])}" + (f" ({place})" if place else "")

    def answer(self, home: str, places: tuple[str, ...]) -> None:
        """Decide the value of one key: --set wins over the file, then the most specific place wins."""
        told = [
            (not _is_override(self.config.place_of(key)), _rank(key), key)
            for key in places
            if key in self.written
        ]
        told.sort(key=lambda item: item[:2])
        if not told:
            self.values[home] = default_of(home)
            self.origins[home] = Origin()
            return
        winner = self.winners[home] = told[0][2]
        self.values[home] = self.written[winner]
        self.origins[home] = Origin(winner, self.config.place_of(winner))
        for typed_later, rank, key in told[1:]:
            if self.written[key] == self.written[winner]:
                continue
            if (typed_later, rank) == told[0][:2]:
                given = f"{exact_text(self.written[key])} disagrees with {self.say(winner)}"
                self.clash((home,), key, given, "one name or the same value", f"delete {key}")
            else:
                why = "typed on the command line" if typed_later != told[0][0] else "more specific"
                self.lose(key, f"{self.say(winner)} is {why}")

    def lose(self, key: str, why: str) -> None:
        """Note that a written key is not used, because another one is."""
        self.unused[key] = why
        self.notes.append(f"{self.say(key)} is not used; {why}.")

    def idle(self, key: str, why: str) -> None:
        """Note that a written key changes nothing."""
        self.unused[key] = why
        self.notes.append(f"{self.say(key)} has no effect: {why}.")

    def take_back(self, key: str, why: str) -> None:
        """Note that a written key changes nothing, and treat it as not written."""
        self.idle(key, why)
        del self.written[key]

    def clash(
        self, about: tuple[str, ...], key: str, given: str, allowed: str, fix: str, loser: str = ""
    ) -> None:
        """Record that written keys contradict each other; `about` names the keys."""
        place = self.config.place_of(key) or Place("config")
        self.clashes.append((frozenset(about), Problem(place, key, given, allowed, fix, loser)))


def _is_override(place: Place | None) -> bool:
    return place is not None and place.line is None


def _answer_all(config: Config) -> _Answers:
    answers = _Answers(config, config.written())
    _settle_switch(answers)
    for home, places in PLACES.items():
        answers.answer(home, places)
    _settle_chunks(answers)
    _settle_workers(answers)
    _settle_augmentation(answers)
    _settle_precision(answers)
    _settle_recipe(answers)
    _note_unread(answers)
    _check_batches(answers)
    return answers


def _settle_switch(answers: _Answers) -> None:
    """Apply the switch of the memory section: `false` disables its keys, `true` changes nothing."""
    is_on = answers.written.get(_SWITCH)
    if is_on:
        del answers.written[_SWITCH]
        answers.unused[_SWITCH] = "the keys beside it count without it"
    elif is_on is False:
        said = answers.say(_SWITCH)
        for key in [
            key for key in answers.written if key.startswith(f"{LAZY}.") and key != _SWITCH
        ]:
            answers.take_back(key, said)


def _settle_chunks(answers: _Answers) -> None:
    values, size, switch = answers.values, "data.chunk_size_gb", "data.use_chunk_loader"
    if not values[switch] and size in answers.winners:
        why = answers.say(answers.winners[switch])
        for key in PLACES[size]:
            if key in answers.written and key not in answers.unused:
                answers.take_back(key, why)
        values[size], answers.origins[size] = None, answers.origins[switch]
    if values["training.output_bound"] is None and "training.output_bound_mode" in answers.winners:
        answers.idle("training.output_bound_mode", "training.output_bound is null")


def _settle_workers(answers: _Answers) -> None:
    values, origins = answers.values, answers.origins
    workers = values["data.num_workers"]
    for home, with_workers, without in (
        ("data.prefetch_factor", 2, None),
        ("data.persistent_workers", True, False),
    ):
        if values[home] is None:
            values[home] = with_workers if workers else without
            if home not in answers.winners:
                how = "with" if workers else "without"
                origins[home] = Origin(default=f"default {how} workers")
        elif values[home] and not workers:
            # torch's DataLoader raises ValueError here, far from the file.
            key = answers.winners[home]
            says = f"{exact_text(values[home])} needs workers, and num_workers is 0"
            says += f" by {origins['data.num_workers']}"
            allowed = f"{home.rpartition('.')[2]} with num_workers of 1 or more"
            fix = f"data.num_workers: 4, or delete {key}"
            answers.clash((home, "data.num_workers"), key, says, allowed, fix)


def _settle_augmentation(answers: _Answers) -> None:
    if answers.values["training.use_gpu_augmentation"]:
        return
    for home in [home for home in answers.winners if home.partition(".")[0] == AUGMENT]:
        answers.take_back(home, "training.use_gpu_augmentation is false")
        answers.values[home], answers.origins[home] = default_of(home), Origin()


def _settle_precision(answers: _Answers) -> None:
    """Reconcile `precision` and `use_amp`: both must agree on whether 16 bits are used."""
    values, origins = answers.values, answers.origins
    about = as_amp, as_format = "training.use_amp", "training.precision"
    amp, precision = answers.winners.get(as_amp), answers.winners.get(as_format)
    full = values[as_format] in _FULL
    if amp is not None and values[as_amp] == full:
        typed = [_is_override(answers.config.place_of(key)) for key in (amp, precision) if key]
        if precision is None or (values[as_format] == "auto" and typed[0] == typed[1]):
            # No format was named: use_amp alone decides whether 16 bits may be used.
            values[as_format], origins[as_format] = "fp32", origins[as_amp]
        elif typed[0] == typed[1]:
            given = f"{exact_text(values[as_format])} disagrees with {answers.say(amp)}"
            allowed = "fp32 or tf32" if full is False else "auto, fp16 or bf16"
            answers.clash(about, precision, given, f"{allowed} beside it", f"delete {amp}", amp)
        else:
            winner, loser = (amp, precision) if typed[0] else (precision, amp)
            answers.lose(loser, f"{answers.say(winner)} is typed on the command line")
            if typed[0]:
                values[as_format] = "auto" if values[as_amp] else "fp32"
                origins[as_format] = origins[as_amp]
    uses_amp = values[as_format] not in _FULL
    if uses_amp != values[as_amp]:
        values[as_amp], origins[as_amp] = uses_amp, origins[as_format]


def _settle_recipe(answers: _Answers) -> None:
    values, origins = answers.values, answers.origins
    if values["recipe.name"] is None and OPTIONS in answers.winners:
        answers.take_back(OPTIONS, "recipe.name is null")
        values[OPTIONS], origins[OPTIONS] = {}, origins["recipe.name"]
    values[OPTIONS] = dict(values[OPTIONS])
    for name in values[OPTIONS]:
        key = f"{OPTIONS}.{name}"
        place = answers.config.place_of(key) or answers.config.place_of(OPTIONS)
        origins[key] = Origin(key, place)


def _note_unread(answers: _Answers) -> None:
    """Note the keys that no job reads, one note per reason."""
    if answers.values["recipe.name"] is None:
        return
    said: dict[str, list[str]] = {}
    for home, why in UNREAD.items():
        key = answers.winners.get(home)
        if key in answers.written and key != _SWITCH:
            said.setdefault(why, []).append(answers.say(key))
    for why, keys in said.items():
        verb = "have" if len(keys) > 1 else "has"
        answers.notes.append(f"{', '.join(keys)} {verb} no effect in `stoker train`: {why}.")


def _check_batches(answers: _Answers) -> None:
    values = answers.values
    about = most, size, drops = (
        "data.max_training_samples",
        "training.batch_size",
        "data.drop_last",
    )
    samples, batch = values[most], values[size]
    # A recipe may have another default batch size; its loader then refuses a split without a batch.
    is_known = size in answers.winners or values["recipe.name"] is None
    if is_known and values[drops] and samples is not None and samples < batch:
        key = answers.winners[most]
        given = f"{samples} samples are less than one batch of {batch}"
        given += f" by {answers.origins[size]}, and drop_last drops it: nothing is left"
        answers.clash(about, key, given, f"{batch} samples or more", f"{key}: {batch}")


def describe_choices(settings: Settings) -> list[str]:
    """Return lines on the settings that shape a training, each with where its value comes from."""
    names = {
        "learning rate": "training.lr",
        "batch size": "training.batch_size",
        "epochs": "training.epochs",
        "precision": "training.precision",
    }
    return [f"{words} {settings.get(key)}: {settings.origins[key]}" for words, key in names.items()]


def find_clashes(config: Config, unreadable: frozenset[str] = frozenset()) -> list[Problem]:
    """Return the problems of keys that are each valid, but contradict each other.

    `unreadable` keys have problems of their own; a clash that one of them might have settled is not reported.
    """
    answers = _answer_all(config)
    unknown = set()
    for home, places in PLACES.items():
        winner = answers.winners.get(home)
        above = places[: places.index(winner)] if winner else places
        if unreadable.intersection(above):
            unknown.add(home)
    return [problem for about, problem in answers.clashes if not about & unknown]


@explained("stoker.config.resolve(stoker.load_config('my.yaml'))")
def resolve(config: Config) -> Settings:
    """Return the settings of a config, with the reason of each value.

    Raises:
        ConfigError: Written keys contradict each other; it names them and their lines.
    """
    if not isinstance(config, Config):
        raise InputError(
            f"resolve was given a {type(config).__name__}.",
            "a Config, as load_config returns it",
            "resolve(load_config('my.yaml'))",
        )
    answers = _answer_all(config)
    if answers.clashes:
        raise as_error([problem for _, problem in answers.clashes])
    rooms = {
        section: model(
            **{entry.name: answers.values[f"{section}.{entry.name}"] for entry in fields(model)}
        )
        for section, model in ROOMS.items()
    }
    return Settings(**rooms, origins=answers.origins, notes=tuple(answers.notes))


def as_error(problems: list[Problem]) -> ConfigError:
    """Return one error that names every problem."""
    if len(problems) == 1:
        only = problems[0]
        head = f"{only.place} {only.key}".rstrip()
        return ConfigError(f"{head}: {only.given}", only.allowed, only.fix)
    return ConfigError(f"{len(problems)} problems:", details=[str(each) for each in problems])
