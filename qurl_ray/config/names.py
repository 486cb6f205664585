"""Names of settings in TRL, verl and OpenRLHF, for error messages that say what they are called here."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "steps": ("max_steps", "total_training_steps", "num_train_steps", "total_steps", "num_steps"),
    "name": ("run_name", "experiment_name"),
    "output_dir": ("default_local_dir", "save_path", "out_dir"),
    "model.path": ("pretrain", "model_name_or_path", "model_path", "model_name", "base_model"),
    "model.max_length": ("max_seq_length", "max_model_len", "max_len", "model_max_length", "max_prompt_length"),
    "task.path": ("train_dataset", "train_files", "prompt_data", "dataset_name", "train_data", "data_path"),
    "task.held_out_path": ("eval_dataset", "val_files", "validation_files", "test_files"),
    "task.prompt_column": ("prompt_key", "input_key"),
    "task.answer_column": ("label_key", "answer_key", "ground_truth_key"),
    "task.chat": ("apply_chat_template", "use_chat_template"),
    "task.system_prompt": ("system_message",),
    "task.chat_template_args": ("chat_template_kwargs", "apply_chat_template_kwargs"),
    "task.reward": ("reward_funcs", "reward_fn", "reward_function", "custom_reward_function", "remote_rm_url"),
    "task.reward_timeout_s": ("reward_timeout",),
    "rollout.prompts_per_step": ("train_batch_size", "rollout_batch_size", "generation_batch_size", "batch_size"),
    "rollout.samples_per_prompt": (
        "n", "num_generations", "n_samples_per_prompt", "group_size", "num_samples", "rollout_n", "samples",
    ),
    "rollout.max_new_tokens": (
        "max_completion_length", "max_response_length", "generate_max_len", "max_tokens", "response_length",
    ),
    "rollout.temperature": ("sampling_temperature",),
    "rollout.quantization": ("quant", "rollout_quantization", "precision"),
    "rollout.engine": ("backend", "rollout_backend", "use_vllm", "inference_engine"),
    "rollout.workers": ("vllm_num_engines", "num_engines", "num_rollout_workers", "rollout_num_gpus"),
    "rollout.vllm.tensor_parallel": ("vllm_tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_size"),
    "rollout.vllm.kv_cache_gb": ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "rollout.max_staleness": ("async_train", "async_training", "staleness", "max_head_offpolicyness"),
    "algorithm.type": ("adv_estimator", "advantage_estimator"),
    "algorithm.updates_per_rollout": (
        "steps_per_generation", "ppo_mini_batch_size", "num_minibatches",
    ),
    "algorithm.clip_low": ("epsilon", "clip_ratio_low", "clip_ratio", "eps_clip", "cliprange"),
    "algorithm.clip_high": ("epsilon_high", "clip_ratio_high", "eps_clip_high"),
    "algorithm.dual_clip": ("clip_ratio_c", "delta"),
    "algorithm.loss_mean": ("loss_type", "loss_agg_mode"),
    "algorithm.advantage": ("scale_rewards", "norm_adv_by_std_in_grpo"),
    "algorithm.objective": ("importance_sampling_level", "loss_mode", "policy_loss_type"),
    "algorithm.dynamic_sampling": ("filter_groups", "dynamic_filtering"),
    "algorithm.kl_coef": ("beta", "kl_loss_coef", "init_kl_coef", "kl_penalty_coef"),
    "algorithm.correction": (
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "rollout_is", "tis",
        "enable_vllm_is_correction",
    ),
    "algorithm.correction.is_cap": (
        "vllm_importance_sampling_cap", "rollout_is_threshold", "vllm_is_truncated_threshold", "tis_imp_ratio_cap",
    ),
    "algorithm.entropy_coef": ("entropy_coeff", "entropy_bonus"),
    "algorithm.router_balance_coef": ("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_coef"),
    "algorithm.router_z_coef": ("moe_z_loss_coeff", "router_z_loss_coef"),
    "algorithm.overlong_buffer": ("overlong_buffer_len",),
    "learner.lr": ("learning_rate", "actor_learning_rate", "optim_lr"),
    "learner.schedule": ("lr_scheduler_type", "lr_scheduler", "warmup_style"),
    "learner.warmup_steps": ("lr_warmup_steps", "num_warmup_steps", "warmup_ratio", "lr_warmup_steps_ratio"),
    "learner.lr_final_share": ("min_lr_ratio", "min_lr_rate"),
    "learner.grad_clip": ("max_grad_norm", "max_norm", "clip_grad", "gradient_clipping"),
    "learner.betas": ("adam_beta1", "adam_beta2", "adam_betas"),
    "learner.optimizer": ("optim", "optimizer_name"),
    "learner.compute": ("bf16", "fp16", "mixed_precision", "dtype", "torch_dtype"),
    "learner.tokens_per_micro_batch": (
        "ppo_max_token_len_per_gpu", "train_max_tokens_per_gpu", "per_device_train_batch_size",
        "micro_train_batch_size", "ppo_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    ),
    "learner.packing": ("use_remove_padding", "packing_samples", "padding_free"),
    "learner.workers": ("n_gpus_per_node", "num_gpus", "actor_num_gpus_per_node", "nproc_per_node"),
    "learner.zero_stage": ("zero", "deepspeed_stage"),
    "learner.sequence_parallel": (
        "ulysses_sequence_parallel_size", "sequence_parallel_size", "sp_size", "context_parallel_size", "cp_size",
        "ring_attn_size",
    ),
    "learner.gradient_checkpointing": ("enable_gradient_checkpointing", "activation_checkpointing"),
    "placement": ("colocate_all_models", "vllm_mode", "colocate", "hybrid_engine"),
    "evaluation.every": ("eval_steps", "test_freq", "eval_every", "eval_interval"),
    "evaluation.problems": ("val_batch_size", "max_eval_samples"),
    "checkpoint.every": ("save_freq", "save_steps", "save_interval", "save_every"),
    "checkpoint.keep": ("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep"),
    "tracking.experiment": ("project_name", "wandb_project", "project"),
    "tracking.console": ("logging", "log_level"),
}  # fmt: skip
"""Names of other frameworks by the setting that means the same here, or does its work."""

SAME: dict[str, str] = {other: key for key, others in ELSEWHERE.items() for other in others}
"""The setting here, by the name elsewhere."""


def meant(key: str) -> str | None:
    """Return the setting that an unknown key means in another framework, by its last part; None if it is not known.

    Example:
        meant("learner.learning_rate") == "learner.lr"
    """
    return SAME.get(key.rpartition(".")[2].lower().replace("-", "_"))
