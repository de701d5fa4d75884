"""Other names of a key: the one table of renames.

Enters: nothing. Leaves: mappings from another name to the dotted key that it means. Costs nothing.

- `LAYOUTS`: keys that config files of the documents have in other sections. A config may write them.
- `FORMER`: names that options had in Python. Models take and show them.
- `SYNONYMS`: what other programs call a key. `stoker config migrate` takes them over; a config, `--set` and
  `Trainer(config=...)` refuse them with the name to write.
"""

from __future__ import annotations

from collections.abc import Mapping

DISTILL = "training.student_distill"
LAZY = "data.memory_efficient_mode"
RAM = f"{LAZY}.ram_32gb_mode"
SECTION_RANKS = (DISTILL, "training", RAM, LAZY, "data", "gpu_optimization")
"""Precedence of sections that write the same key, the most specific first."""

LAYOUTS: Mapping[str, str] = {
    f"{DISTILL}.batch_size": "training.batch_size",
    f"{DISTILL}.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    f"{DISTILL}.num_workers": "data.num_workers",
    "training.learning_rate": "training.lr",
    "training.num_workers": "data.num_workers",
    f"{RAM}.max_training_samples": "data.max_training_samples",
    f"{RAM}.gradient_accumulation": "training.gradient_accumulation_steps",
    f"{RAM}.empty_cache_frequency": "training.empty_cache_every_n_batches",
    f"{LAZY}.use_lazy_loading": "data.use_lazy_loading",
    f"{LAZY}.enabled": "data.use_lazy_loading",
    f"{LAZY}.lazy_cache_dir": "data.lazy_cache_dir",
    f"{LAZY}.precompute_graphs": "data.precompute_graphs",
    "data.batch_size": "training.batch_size",
    **{
        f"gpu_optimization.{name}": f"{section}.{name}"
        for section, names in {
            "training": "batch_size use_amp gradient_accumulation_steps empty_cache_every_n_epochs "
            "log_gpu_stats_every_n_batches",
            "data": "use_chunk_loader chunk_size_gb num_workers prefetch_factor persistent_workers pin_memory "
            "drop_last",
        }.items()
        for name in names.split()
    },
}

FORMER: Mapping[str, str] = {
    "accumulation_steps": "training.gradient_accumulation_steps",
    "learning_rate": "training.lr",
    "gradient_accumulation": "training.gradient_accumulation_steps",
    "empty_cache_frequency": "training.empty_cache_every_n_batches",
    "lazy_loading": "data.use_lazy_loading",
    "run_dir": "run.dir",
    "recipe": "recipe.name",
    "augmentation": "training.use_gpu_augmentation",
    "recipe_options": "recipe.options",
}

_WORDS = {
    "training.batch_size": "train_batch_size",
    "data.num_workers": "workers n_workers dataloader_workers",
    "training.epochs": "num_epochs n_epochs max_epochs",
    "training.lr": "base_lr initial_lr",
    "training.gradient_accumulation_steps": "accumulation_steps gradient_accumulation grad_accum_steps "
    "grad_accumulation_steps accumulate_grad_batches",
    "training.clip_norm": "grad_clip gradient_clip gradient_clip_val gradient_clip_norm grad_clip_norm "
    "clip_grad_norm max_grad_norm",
    "training.use_amp": "amp mixed_precision use_mixed_precision",
    "training.seed": "random_seed random_state",
    "training.compile": "torch_compile use_compile compile_model",
    "training.tensorboard": "use_tensorboard",
    "training.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing "
    "use_checkpointing",
    "training.init_gain": "xavier_gain gain",
    "training.output_bound": "output_clip output_clamp output_clipping clip_outputs",
    "training.use_gpu_augmentation": "gpu_augmentation_enabled gpu_augmentation",
    "data.chunk_size_gb": "chunk_gb",
    f"{LAZY}.enabled": "memory_efficient_mode memory_efficient",
    "data.lazy_cache_dir": "cache_dir",
    "data.use_lazy_loading": "lazy_loading lazy",
    "data.max_training_samples": "max_samples max_train_samples",
    "training.empty_cache_every_n_batches": "empty_cache_steps",
    "recipe.store": "hdf5_path h5_path hdf5_file data_path",
    "run.dir": "run_dir output_dir save_dir checkpoint_dir",
}

SYNONYMS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}
