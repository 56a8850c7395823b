r"""GRPO on Qwen3-8B-Base with NeMo RL's hyperparameters, FP8 throughout.

    python -m fp8rl_jax.train --config=configs/qwen3_8b.py \
        --config.model.path=Qwen3-8B-Base \
        --config.task.train_path=dapo_math_17k.jsonl \
        --config.task.validation_path=aime24.jsonl

``model.path`` is a Hugging Face folder with its tokenizer (or, with the ``hub`` extra,
Qwen/Qwen3-8B-Base). The data are JSONL in GSM8K's form, ``question`` and an ``answer``
that ends ``#### N``; DAPO-Math-17K and AIME have numeric answers and convert as they
are.

The numbers are those of NeMo RL's one-node FP8 recipe for this model: 32 prompts x 16
samples in one update, sequences of 8192 tokens with prompts up to 2048, learning rate
1e-6 after 10 steps of warm-up from 1e-7, weight decay 0.1, leave-one-out baseline, KL
penalty 0.01, clip 0.2, validation every 20 steps. It recomputes the old log-probs and
corrects for the sampler by an untruncated importance ratio; here the sampler's
log-probs are the old ones, which is the same product in one factor.

Moments are stored in bfloat16 (rounded stochastically), sequences packed into rows of
8,192 tokens.

Hardware: one H200 (141 GB) or more; the state is sharded over all of them. Set
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92. `python -m fp8rl_jax.plan` says what each part
    takes: on one, 128.5 GB in an update; 68 sequences of full length at once.
Time: a step of 512 sequences of 256 + 1,024 tokens, without the KL penalty, took 70.5
    seconds on one H200 (docs/benchmarks.md); longer ones are not measured yet.
Result: not measured yet.
"""

from fp8rl_jax.config import base_config


def get_config():
    c = base_config()
    c.run_dir = "runs/qwen3_8b"
    c.compilation_cache = "runs/compilation_cache"
    c.model.size = "8b"
    c.task.name = "gsm8k"
    c.task.prompt_format = "plain"  # a base model: it ends a text, not a turn
    c.task.max_prompt_length = 2048
    c.sampling.max_new_tokens = 6144
    c.mesh.data = 1
    c.mesh.fsdp = -1
    c.grpo.num_steps = 60
    c.grpo.num_prompts_per_step = 32
    c.grpo.num_generations_per_prompt = 16
    c.loss.algorithm = "grpo"
    c.loss.baseline = "leave_one_out"
    c.loss.normalize_std = True
    c.loss.aggregation = "token_mean"
    c.loss.clip_ratio_low = 0.2
    c.loss.clip_ratio_high = 0.2
    c.loss.kl_coefficient = 0.01
    c.loss.kl_type = "k3"
    c.train.tokens_per_micro_batch = 8192
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.optimizer.warmup_start = 0.1
    c.optimizer.weight_decay = 0.1
    c.optimizer.mu_dtype = "bfloat16"
    c.optimizer.nu_dtype = "bfloat16"
    c.validation.period = 20
    c.validation.batch_size = 32
    c.checkpoint.period = 20
    return c
