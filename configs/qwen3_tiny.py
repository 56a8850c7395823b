"""A 1M-parameter Qwen3 learns addition, FP8 throughout: the demo.

python -m fp8rl_jax.train --config=configs/qwen3_tiny.py
"""

from fp8rl_jax.config import base_config


def get_config():
    c = base_config()
    c.run_dir = "runs/qwen3_tiny"
    c.model.size = "custom"
    c.tokenizer.path = "byte"
    c.task.name = "arithmetic"
    c.task.max_prompt_length = 16
    c.task.hold_out_commuted = False
    c.sampling.max_new_tokens = 4
    c.grpo.num_steps = 40
    c.train.micro_batch_size = 512
    c.train.remat = "none"
    c.optimizer.learning_rate = 3e-4
    c.optimizer.warmup_steps = 5
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.0
    c.validation.batch_size = 200
    c.warm_start.enabled = True
    return c
