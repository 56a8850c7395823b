r"""GRPO on Qwen3-0.6B with GSM8K, FP8 throughout.

    python -m fp8rl_jax.train --config=configs/qwen3_0p6b_gsm8k.py \
        --config.model.path=Qwen3-0.6B \
        --config.task.train_path=gsm8k/train.jsonl \
        --config.task.validation_path=gsm8k/test.jsonl

``model.path`` is a Hugging Face folder with its tokenizer (or, with the ``hub`` extra,
a name such as Qwen/Qwen3-0.6B); the data are GSM8K's JSONL files. For a trial without
weights, make a folder with `fp8rl_jax.models.qwen3.make_checkpoint`.

Hardware: one H200. Further GPUs are used as replicas (``mesh.data``); their number must
    divide the 32 prompts of a step and the 32 rows of a micro-batch.
Time: not measured yet.
Result: not measured yet with real weights.
"""

from fp8rl_jax.config import base_config


def get_config():
    c = base_config()
    c.run_dir = "runs/qwen3_0p6b_gsm8k"
    c.compilation_cache = "runs/compilation_cache"
    c.task.name = "gsm8k"
    c.task.max_prompt_length = 256
    c.sampling.max_new_tokens = 512
    c.grpo.num_steps = 200
    c.grpo.num_prompts_per_step = 32
    c.grpo.num_generations_per_prompt = 16
    c.train.micro_batch_size = 32
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.optimizer.weight_decay = 0.0
    c.validation.period = 20
    c.validation.max_prompts = 512
    c.validation.batch_size = 256
    c.checkpoint.period = 20
    return c
