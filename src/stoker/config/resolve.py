"""From what the file says to what the code does: one value per question, with its reason.

Enters: a `Config`. Leaves: frozen `Settings`; every value names the key and line it comes
from, and every written key that lost, or that a job does not read, is a note. Costs microseconds; pure.

Who wins when several keys answer the same question (docs/config.md has the why):
`--set` before the file; then the most specific section:
training.student_distill > training > data.memory_efficient_mode.ram_32gb_mode > data >
gpu_optimization > default. Two names at one rank that disagree are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from stoker.config.tree import Config, Precision, default_of
from stoker.config.yaml_lines import Place, Problem
from stoker.errors import ConfigError
from stoker.strict_json import exact_text
from stoker.units import GIB

DISTILL, TRAIN, DATA, GPU = "training.student_distill", "training", "data", "gpu_optimization"
LAZY = "data.memory_efficient_mode"
RAM = "data.memory_efficient_mode.ram_32gb_mode"
AUGMENT = "gpu_augmentation"
OPTIONS = "recipe.options"

_FULL = ("fp32", "tf32")

# One row per question: the field of Settings, then its keys, most specific first. Names that
# share a rank share a string, split by "|". The default is that of the last key.
QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "batch_size": tuple(f"{section}.batch_size" for section in (DISTILL, TRAIN, DATA, GPU)),
    "num_workers": tuple(f"{section}.num_workers" for section in (DISTILL, TRAIN, DATA, GPU)),
    "accumulation_steps": (
        f"{DISTILL}.gradient_accumulation_steps",
        f"{TRAIN}.gradient_accumulation_steps",
        f"{RAM}.gradient_accumulation",
        f"{GPU}.gradient_accumulation_steps",
    ),
    "prefetch_factor": (f"{DATA}.prefetch_factor", f"{GPU}.prefetch_factor"),
    "persistent_workers": (f"{DATA}.persistent_workers", f"{GPU}.persistent_workers"),
    "pin_memory": (f"{DATA}.pin_memory", f"{GPU}.pin_memory"),
    "drop_last": (f"{DATA}.drop_last", f"{GPU}.drop_last"),
    "use_chunk_loader": (f"{GPU}.use_chunk_loader",),
    "chunk_bytes": (f"{GPU}.chunk_size_gb",),
    "use_amp": (f"{TRAIN}.use_amp", f"{GPU}.use_amp"),
    **{
        name: (f"{TRAIN}.{name}",)
        for name in (
            "epochs",
            "precision",
            "capture",
            "compile",
            "clip_norm",
            "nonfinite",
            "seed",
            "read_every",
            "max_steps",
            "patience",
            "min_delta",
            "keep_last",
            "checkpoint_every_epochs",
            "checkpoint_every_steps",
            "tensorboard",
            "activation_checkpointing",
            "survive_oom",
            "parallel",
            "stall_seconds",
        )
    },
    "learning_rate": (f"{TRAIN}.lr|{TRAIN}.learning_rate",),
    "init_gain": (f"{TRAIN}.init_gain",),
    "output_bound": (f"{TRAIN}.output_bound",),
    "output_bound_mode": (f"{TRAIN}.output_bound_mode",),
    "augmentation": (f"{TRAIN}.use_gpu_augmentation",),
    "memory_efficient": (f"{LAZY}.enabled",),
    "lazy_loading": (f"{LAZY}.use_lazy_loading",),
    "lazy_cache_dir": (f"{LAZY}.lazy_cache_dir",),
    "precompute_graphs": (f"{LAZY}.precompute_graphs",),
    "max_training_samples": (f"{RAM}.max_training_samples",),
    "empty_cache_every_n_batches": (f"{RAM}.empty_cache_frequency",),
    "empty_cache_every_n_epochs": (f"{GPU}.empty_cache_every_n_epochs",),
    "log_gpu_stats_every_n_batches": (f"{GPU}.log_gpu_stats_every_n_batches",),
    "recipe": ("recipe.name",),
    "store": ("recipe.store",),
    "recipe_options": (OPTIONS,),
    "run_dir": ("run.dir",),
}


# What `stoker train` does not read, whatever the recipe, and why. Programs of the user's own may read it.
_STORE_IS_READ = "the packed store is read when samples are needed, and needs no cache of its own"
UNREAD: Mapping[str, str] = {
    "num_workers": "the store is read by threads of the training process, as many as the machine allows",
    "prefetch_factor": "there are no worker processes: the loader fills its own slots ahead",
    "persistent_workers": "there are no worker processes",
    "pin_memory": "batches always go through pinned memory on their way to a GPU",
    "lazy_loading": _STORE_IS_READ,
    "lazy_cache_dir": _STORE_IS_READ,
    "precompute_graphs": "graphs are packed into the store and expanded on the device",
}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        key: The dotted key, or the option of a command, that says it; "" when nobody does.
        place: Where that key is written, if it is known.
        default: Whose default it is; not empty exactly when `key` is.
    """

    key: str = ""
    place: Place | None = None
    default: str = "default"

    def __str__(self) -> str:
        """Format as `key (file:line:column)`, or say whose default it is."""
        if not self.key:
            return self.default
        return f"{self.key} ({self.place})" if self.place else self.key


RECIPE_DEFAULT = "the recipe's default"


@dataclass(frozen=True)
class AugmentationSettings:
    """What is drawn per sample on the GPU; the meaning of each is in `tree.GpuAugmentation`."""

    horizontal_flip_prob: float
    rotation_degrees: float
    brightness: float
    contrast: float
    saturation: float


@dataclass(frozen=True)
class Settings:
    """One value per question. What the code reads; a user writes a config instead.

    Attributes:
        batch_size: Samples per step, over all ranks together.
        num_workers: Loading processes; 0 means the training process loads.
        accumulation_steps: Batches per optimizer update.
        prefetch_factor: Batches ahead per worker; None exactly when there are no workers.
        persistent_workers: Keep workers between epochs.
        pin_memory: Stage through pinned memory where there is a GPU.
        drop_last: Drop a short last batch.
        use_chunk_loader: Load chunks to the device and cut batches there.
        chunk_bytes: Bytes of one chunk; None leaves it to the plan, or no chunks are used.
        use_amp: Automatic mixed precision; always what `precision` comes to.
        precision: Number format of the step; "auto" is decided where the model is known.
        capture: Replay the step as one CUDA graph.
        compile: Compile the model first.
        epochs: Passes over the training samples.
        clip_norm: Largest norm of the gradients; None does not clip.
        nonfinite: What to do about a loss that is not finite.
        seed: Of everything random.
        read_every: Steps between two reads of losses.
        max_steps: Batches of the whole run, at most.
        patience: Epochs without a better metric after which the run ends; 0 is never.
        min_delta: By how much an epoch must be better.
        keep_last: Checkpoints kept besides the best.
        checkpoint_every_epochs: 0 is never.
        checkpoint_every_steps: 0 is never.
        tensorboard: Write scalars for TensorBoard.
        activation_checkpointing: Recompute activations in the backward pass.
        survive_oom: Repeat the update with less memory when the device runs out of it.
        parallel: With several ranks, the whole model on each or a part of it.
        stall_seconds: With several ranks, how long none may move.
        learning_rate: Of the optimizer.
        init_gain: Xavier gain, or None for the model's own initialisation.
        output_bound: Outputs stay within plus or minus this; None is unbounded.
        output_bound_mode: "soft" (tanh) or "clamp".
        augmentation: What to draw, or None for no augmentation on the GPU.
        lazy_loading: Read samples from the cache on disk instead of holding them in RAM.
        lazy_cache_dir: Folder of that cache.
        precompute_graphs: Build molecule graphs into the cache.
        max_training_samples: Train on so many, drawn by the seed; None is all.
        empty_cache_every_n_batches: 0 is never.
        empty_cache_every_n_epochs: 0 is never.
        log_gpu_stats_every_n_batches: 0 is never.
        recipe: Name of a ready job, or `package.module:Class`; None when the config is for something else.
        store: What it trains on; None leaves it to the command line.
        recipe_options: As written; the recipe checks them.
        run_dir: Folder of the run; None is runs/ and the recipe's name.
        origins: Per field, per "augmentation.<name>" and per "recipe_options.<name>", where its value
            comes from.
        notes: Written keys that have no effect, and why.
    """

    batch_size: int
    num_workers: int
    accumulation_steps: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    drop_last: bool
    use_chunk_loader: bool
    chunk_bytes: int | None
    use_amp: bool
    precision: Precision
    capture: Literal["auto", "on", "off"]
    compile: bool
    epochs: int
    clip_norm: float | None
    nonfinite: Literal["stop", "skip", "rollback"]
    seed: int
    read_every: int
    max_steps: int | None
    patience: int
    min_delta: float | None
    keep_last: int
    checkpoint_every_epochs: int
    checkpoint_every_steps: int
    tensorboard: bool
    activation_checkpointing: bool
    survive_oom: bool
    parallel: Literal["ddp", "fsdp"]
    stall_seconds: int
    learning_rate: float
    init_gain: float | None
    output_bound: float | None
    output_bound_mode: Literal["soft", "clamp"]
    augmentation: AugmentationSettings | None
    lazy_loading: bool
    lazy_cache_dir: str
    precompute_graphs: bool
    max_training_samples: int | None
    empty_cache_every_n_batches: int
    empty_cache_every_n_epochs: int
    log_gpu_stats_every_n_batches: int
    recipe: str | None
    store: str | None
    recipe_options: Mapping[str, Any] = field(hash=False)
    run_dir: str | None
    origins: Mapping[str, Origin] = field(compare=False, repr=False)
    notes: tuple[str, ...] = field(compare=False)

    @property
    def samples_per_update(self) -> int:
        """Samples behind one optimizer update, over all ranks together."""
        return self.batch_size * self.accumulation_steps

    @property
    def reasons(self) -> dict[str, str]:
        """The origins in words."""
        return {name: str(origin) for name, origin in self.origins.items()}

    def is_default(self, name: str) -> bool:
        """Whether nobody wrote this; a plan or a tuner may then choose a better value."""
        return not self.origins[name].key

    def told(self, name: str, value: Any, option: str) -> Settings:
        """Return settings in which an option of the command line, such as `--store`, says one value."""
        return replace(self, **{name: value}, origins={**self.origins, name: Origin(option)})

    def with_recipe_defaults(self, defaults: Mapping[str, tuple[Any, str]]) -> Settings:
        """Return settings in which a recipe's defaults stand where nobody wrote anything.

        Args:
            defaults: Field to value and reason. A field that has a recipe's default already keeps its
                value: a tuner may have changed it since.
        """
        free = {name: each for name, each in defaults.items() if self.origins[name] == Origin()}
        values: dict[str, Any] = {name: value for name, (value, _) in free.items()}
        origins = {
            name: Origin(default=f"{RECIPE_DEFAULT}, {why}") for name, (_, why) in free.items()
        }
        return replace(self, **values, origins={**self.origins, **origins})

    def values(self) -> dict[str, Any]:
        """Return every value by the names used in `reasons`, augmentation flattened."""
        flat = {name: getattr(self, name) for name in _VALUE_FIELDS}
        if self.augmentation is not None:
            del flat["augmentation"]
            flat |= {f"augmentation.{k}": v for k, v in asdict(self.augmentation).items()}
        return flat

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document: settings with reasons, and the notes."""
        rows = {
            name: {"value": value, "reason": self.reasons[name]}
            for name, value in self.values().items()
        }
        return {"settings": rows, "notes": list(self.notes)}


_VALUE_FIELDS = tuple(
    item.name for item in fields(Settings) if item.name not in ("origins", "notes")
)


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

    def answer(self, question: str, keys: tuple[str, ...]) -> None:
        """Settle one question: --set before the file, then the first rank that was written."""
        told = [
            (not _is_override(self.config.place_of(key)), rank, key)
            for rank, names in enumerate(keys)
            for key in names.split("|")
            if key in self.written
        ]
        told.sort(key=lambda item: item[:2])
        if not told:
            self.values[question] = default_of(keys[-1].split("|")[0])
            self.origins[question] = Origin()
            return
        winner = self.winners[question] = told[0][2]
        self.values[question] = self.written[winner]
        self.origins[question] = Origin(winner, self.config.place_of(winner))
        for typed_later, rank, key in told[1:]:
            if self.written[key] == self.written[winner]:
                continue
            if (typed_later, rank) == told[0][:2]:
                given = f"{exact_text(self.written[key])} disagrees with {self.say(winner)}"
                self.clash((question,), key, given, "one name or the same value", f"delete {key}")
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

    def ignore(self, prefix: str, why: str) -> None:
        """Take back every written key under `prefix`, with a note each."""
        for key in [key for key in self.written if key.startswith(prefix)]:
            self.idle(key, why)
            del self.written[key]

    def clash(
        self, about: tuple[str, ...], key: str, given: str, allowed: str, fix: str, loser: str = ""
    ) -> None:
        """Record that written keys cannot stand together; `about` names the questions."""
        place = self.config.place_of(key) or Place("config")
        self.clashes.append((frozenset(about), Problem(place, key, given, allowed, fix, loser)))


def _is_override(place: Place | None) -> bool:
    return place is not None and place.line is None


def _answer_all(config: Config) -> _Answers:
    answers = _Answers(config, config.written())
    switch = f"{LAZY}.enabled"
    if not answers.written.get(switch, default_of(switch)):
        said = answers.say(switch)
        del answers.written[switch]
        answers.ignore(f"{LAZY}.", said)
        answers.written[switch] = False
    for question, keys in QUESTIONS.items():
        answers.answer(question, keys)
    _settle_memory(answers)
    _settle_workers(answers)
    _settle_augmentation(answers)
    _settle_precision(answers)
    _settle_recipe(answers)
    _note_unread(answers)
    _check_batches(answers)
    return answers


def _settle_memory(answers: _Answers) -> None:
    values, origins = answers.values, answers.origins
    if not values.pop("memory_efficient"):
        values["lazy_loading"], origins["lazy_loading"] = False, origins["memory_efficient"]
    del origins["memory_efficient"]
    if values["chunk_bytes"] is not None:
        # Memory is binary here, whatever the key is called.
        values["chunk_bytes"] = int(values["chunk_bytes"] * GIB)
    if not values["use_chunk_loader"] and "chunk_bytes" in answers.winners:
        answers.ignore(f"{GPU}.chunk_size_gb", answers.say(f"{GPU}.use_chunk_loader"))
        values["chunk_bytes"], origins["chunk_bytes"] = None, origins["use_chunk_loader"]
    if values["output_bound"] is None and "output_bound_mode" in answers.winners:
        answers.idle(f"{TRAIN}.output_bound_mode", f"{TRAIN}.output_bound is null")


def _settle_workers(answers: _Answers) -> None:
    values, origins = answers.values, answers.origins
    workers = values["num_workers"]
    for question, with_workers, without in (
        ("prefetch_factor", 2, None),
        ("persistent_workers", True, False),
    ):
        if values[question] is None:
            values[question] = with_workers if workers else without
            if question not in answers.winners:
                how = "with" if workers else "without"
                origins[question] = Origin(default=f"default {how} workers")
        elif values[question] and not workers:
            # torch's DataLoader raises ValueError here, far from the file.
            key = answers.winners[question]
            says = f"{exact_text(values[question])} needs workers, and num_workers is 0"
            says += f" by {origins['num_workers']}"
            allowed = f"{question} with num_workers of 1 or more"
            fix = f"{DATA}.num_workers: 4, or delete {key}"
            answers.clash((question, "num_workers"), key, says, allowed, fix)


def _settle_augmentation(answers: _Answers) -> None:
    if not answers.values["augmentation"]:
        answers.ignore(f"{AUGMENT}.", f"{TRAIN}.use_gpu_augmentation is false")
        answers.values["augmentation"] = None
        return
    names = [item.name for item in fields(AugmentationSettings)]
    for name in names:
        answers.answer(f"augmentation.{name}", (f"{AUGMENT}.{name}",))
    drawn = {name: answers.values.pop(f"augmentation.{name}") for name in names}
    answers.values["augmentation"] = AugmentationSettings(**drawn)


def _settle_precision(answers: _Answers) -> None:
    """Make one answer of `precision` and `use_amp`: 16 bits, or not, must mean the same in both."""
    values, origins = answers.values, answers.origins
    values["capture"] = {True: "on", False: "off"}.get(values["capture"], values["capture"])
    amp, precision = answers.winners.get("use_amp"), answers.winners.get("precision")
    full = values["precision"] in _FULL
    if amp is not None and values["use_amp"] == full:
        typed = [_is_override(answers.config.place_of(key)) for key in (amp, precision) if key]
        if precision is None or (values["precision"] == "auto" and typed[0] == typed[1]):
            # Nobody named a format: use_amp alone says whether it may be one of 16 bits.
            values["precision"], origins["precision"] = "fp32", origins["use_amp"]
        elif typed[0] == typed[1]:
            given = f"{exact_text(values['precision'])} disagrees with {answers.say(amp)}"
            allowed = "fp32 or tf32" if full is False else "auto, fp16 or bf16"
            about = ("precision", "use_amp")
            answers.clash(about, precision, given, f"{allowed} beside it", f"delete {amp}", amp)
        else:
            winner, loser = (amp, precision) if typed[0] else (precision, amp)
            answers.lose(loser, f"{answers.say(winner)} is typed on the command line")
            if typed[0]:
                values["precision"] = "auto" if values["use_amp"] else "fp32"
                origins["precision"] = origins["use_amp"]
    uses_amp = values["precision"] not in _FULL
    if uses_amp != values["use_amp"]:
        values["use_amp"], origins["use_amp"] = uses_amp, origins["precision"]


def _settle_recipe(answers: _Answers) -> None:
    values, origins = answers.values, answers.origins
    if values["recipe"] is None and "recipe_options" in answers.winners:
        answers.ignore(OPTIONS, "recipe.name is null")
        values["recipe_options"], origins["recipe_options"] = {}, origins["recipe"]
    values["recipe_options"] = dict(values["recipe_options"])
    for name in values["recipe_options"]:
        key = f"{OPTIONS}.{name}"
        place = answers.config.place_of(key) or answers.config.place_of(OPTIONS)
        origins[f"recipe_options.{name}"] = Origin(key, place)


def _note_unread(answers: _Answers) -> None:
    """Note the keys that no job reads, one note per reason."""
    if answers.values["recipe"] is None:
        return
    said: dict[str, list[str]] = {}
    for question, why in UNREAD.items():
        key = answers.winners.get(question)
        if key in answers.written:
            said.setdefault(why, []).append(answers.say(key))
    for why, keys in said.items():
        verb = "have" if len(keys) > 1 else "has"
        answers.notes.append(f"{', '.join(keys)} {verb} no effect in `stoker train`: {why}.")


def _check_batches(answers: _Answers) -> None:
    values = answers.values
    samples, batch = values["max_training_samples"], values["batch_size"]
    # A recipe may have another default; its loader then refuses what leaves no batch.
    is_known = "batch_size" in answers.winners or values["recipe"] is None
    if is_known and values["drop_last"] and samples is not None and samples < batch:
        key = answers.winners["max_training_samples"]
        given = f"{samples} samples are less than one batch of {batch}"
        given += f" by {answers.origins['batch_size']}, and drop_last drops it: nothing is left"
        about = ("max_training_samples", "batch_size", "drop_last")
        answers.clash(about, key, given, f"{batch} samples or more", f"{key}: {batch}")


def describe_choices(settings: Settings) -> list[str]:
    """Return lines on the settings that shape a training, each with where its value comes from."""
    names = {
        "learning rate": "learning_rate",
        "batch size": "batch_size",
        "epochs": "epochs",
        "precision": "precision",
    }
    return [
        f"{words} {getattr(settings, name)}: {settings.origins[name]}"
        for words, name in names.items()
    ]


def find_clashes(config: Config, unreadable: frozenset[str] = frozenset()) -> list[Problem]:
    """Return the problems of keys that are right alone and wrong together.

    Args:
        config: What was written.
        unreadable: Keys that were left out because they have problems of their own; a clash
            that one of them might have settled is not reported.
    """
    answers = _answer_all(config)
    unknown = {
        question
        for question, keys in QUESTIONS.items()
        if unreadable & _might_win(keys, answers.winners.get(question))
    }
    return [problem for about, problem in answers.clashes if not about & unknown]


def _might_win(keys: tuple[str, ...], winner: str | None) -> set[str]:
    ordered = [key for names in keys for key in names.split("|")]
    return set(ordered[: ordered.index(winner)] if winner else ordered)


def resolve(config: Config) -> Settings:
    """Return one value per question, with the reason of each.

    Raises:
        ConfigError: When written keys cannot stand together; names them and their lines.
    """
    answers = _answer_all(config)
    if answers.clashes:
        raise as_error([problem for _, problem in answers.clashes])
    return Settings(**answers.values, origins=answers.origins, notes=tuple(answers.notes))


def as_error(problems: list[Problem]) -> ConfigError:
    """Return one error that names every problem."""
    if len(problems) == 1:
        only = problems[0]
        head = f"{only.place} {only.key}".rstrip()
        return ConfigError(f"{head}: {only.given}", only.allowed, only.fix)
    return ConfigError(f"{len(problems)} problems:", details=[str(each) for each in problems])
