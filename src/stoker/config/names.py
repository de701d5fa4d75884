"""What other programs and older files call a key, and the key here: the one table of renames.

Enters: nothing. Leaves: a mapping from a bare name to a dotted key. Costs nothing; imports nothing.

`stoker config migrate` takes such names over; a config, `--set` and `Trainer(config=...)` refuse them with the
name to write.
"""

from __future__ import annotations

from collections.abc import Mapping

_WORDS = {
    "training.batch_size": "train_batch_size",
    "training.num_workers": "workers n_workers dataloader_workers",
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
    "gpu_optimization.chunk_size_gb": "chunk_gb",
    "data.memory_efficient_mode.enabled": "memory_efficient_mode memory_efficient",
    "data.memory_efficient_mode.lazy_cache_dir": "cache_dir",
    "data.memory_efficient_mode.use_lazy_loading": "lazy_loading lazy",
    "data.memory_efficient_mode.ram_32gb_mode.max_training_samples": "max_samples max_train_samples",
    "data.memory_efficient_mode.ram_32gb_mode.empty_cache_frequency": "empty_cache_every_n_batches empty_cache_steps",
    "recipe.store": "hdf5_path h5_path hdf5_file data_path",
    "run.dir": "run_dir output_dir save_dir checkpoint_dir",
}

SYNONYMS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}
