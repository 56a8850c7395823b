"""The smallest run that does everything: sums of one digit, a one-layer model.

python -m fp8rl_jax.train --config=tests/tiny_config.py --config.run_dir=DIR

Seconds on a CPU; what it learns does not matter.
"""

from fp8rl_jax.config import base_config


def get_config():
    c = base_config()
    c.seed = 0
    c.model.size = "custom"
    c.model.init_std = 0.05
    c.model.custom.num_layers = 1
    c.model.custom.head_dim = 64
    c.model.custom.intermediate_size = 128
    c.tokenizer.path = "byte"
    c.task.name = "arithmetic"
    c.task.max_operand = 4
    c.task.num_validation = 7
    c.task.hold_out_commuted = False
    c.sampling.max_new_tokens = 3
    c.grpo.num_steps = 10
    c.grpo.num_prompts_per_step = 4
    c.grpo.num_generations_per_prompt = 4
    c.grpo.num_epochs = 2
    c.grpo.num_mini_batches = 2
    c.train.micro_batch_size = 4
    c.train.remat = "none"
    c.optimizer.learning_rate = 1e-3
    c.optimizer.warmup_steps = 2
    c.validation.period = 4
    c.validation.batch_size = 4  # does not divide the 7 prompts
    c.warm_start.enabled = True
    c.warm_start.batch_size = 16
    c.warm_start.learning_rate = 1e-2
    c.warm_start.stop_accuracy = 0.1
    c.warm_start.max_accuracy = 0.9
    c.grading.num_workers = 1
    c.checkpoint.period = 5

    c.logging.tensorboard = False
    c.logging.samples_period = 5
    return c
