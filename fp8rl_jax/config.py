"""The configuration tree: every option with its default.

A file in configs/ returns `base_config()` with a few fields changed, and any field can
be set on the command line, ``--config.grpo.num_steps=10``. The tree is locked: a name
that is not here is an error. `fp8rl_jax.experiment` checks the values and turns them
into objects.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def base_config() -> ConfigDict:
    """Every option with its default."""
    c = ConfigDict()
    c.seed = 42
    c.run_dir = ""  # checkpoints, metrics and curves; a run found there is resumed
    c.compilation_cache = ""  # folder of compiled programs; "": JAX's own setting
    c.recipe = "fp8"  # bf16 | fp8_rollout_linear | fp8_rollout | fp8

    c.model = ConfigDict()
    c.model.path = ""  # HF folder (or hub name); "" draws random weights of `size`
    c.model.size = "0.6b"  # 0.6b | 1.7b | 4b | 8b | 14b | 32b | custom
    c.model.init_std = 0.02  # of random weights
    c.model.custom = ConfigDict()  # the shape for size="custom"
    c.model.custom.vocab_size = 384
    c.model.custom.hidden_size = 128
    c.model.custom.num_layers = 4
    c.model.custom.num_heads = 2
    c.model.custom.num_kv_heads = 1
    c.model.custom.head_dim = 128
    c.model.custom.intermediate_size = 384
    c.model.custom.tie_word_embeddings = True

    c.tokenizer = ConfigDict()
    c.tokenizer.path = ""  # "byte", or an HF folder; "" takes model.path
    c.tokenizer.enable_thinking = False  # Qwen3's chat template; not for "byte"

    c.task = ConfigDict()
    c.task.name = "gsm8k"  # gsm8k | arithmetic
    c.task.train_path = ""  # gsm8k: JSONL with `question` and `answer`
    c.task.validation_path = ""  # gsm8k: likewise, held out
    c.task.prompt_format = "chat"  # gsm8k: chat | plain
    c.task.max_prompt_length = 2048  # tokens; longer prompts are dropped and counted
    c.task.max_operand = 19  # arithmetic: operands run from 0 to this
    c.task.num_operands = 2  # arithmetic
    c.task.operators = "+"  # arithmetic: any of +-*
    c.task.num_validation = 200  # arithmetic: problems held out
    c.task.hold_out_commuted = True  # arithmetic: b+a is held out with a+b

    c.mesh = ConfigDict()  # sizes multiply to the number of devices; -1: the rest
    c.mesh.data = -1  # replicas
    c.mesh.fsdp = 1  # shards of parameters and optimiser state
    c.mesh.tensor = 1  # shards of heads and feed-forward columns

    c.grpo = ConfigDict()
    c.grpo.num_steps = 100
    c.grpo.num_prompts_per_step = 32
    c.grpo.num_generations_per_prompt = 16
    c.grpo.num_epochs = 1  # passes over each rollout batch
    c.grpo.num_mini_batches = 1  # optimiser steps per pass
    c.grpo.shuffle_rewards = False  # negative control: rewards dealt at random

    c.loss = ConfigDict()
    c.loss.algorithm = "dapo"  # grpo | dr_grpo | dapo
    # These five are the algorithm's own unless set.
    c.loss.baseline = placeholder(str)  # mean | leave_one_out
    c.loss.normalize_std = placeholder(bool)
    c.loss.aggregation = placeholder(str)  # see grpo.config.LossConfig
    c.loss.clip_ratio_low = placeholder(float)
    c.loss.clip_ratio_high = placeholder(float)
    c.loss.dual_clip = placeholder(float)  # c > 1; None: off
    c.loss.kl_coefficient = 0.0
    c.loss.kl_type = "k3"  # k1 | k2 | k3
    c.loss.kl_placement = "loss"  # loss | reward
    c.loss.tis_ratio = placeholder(float)  # C of truncated importance sampling
    c.loss.old_policy = "rollout"  # rollout | recomputed | current

    c.train = ConfigDict()
    c.train.micro_batch_size = 32  # rows per forward and backward, over all devices
    c.train.tokens_per_micro_batch = 0  # of a device, packed; 0: rows as above
    c.train.remat = "full"  # none | attention | full | dots: what is computed again
    c.train.keep_codes = True  # of all layers in an update; False: a layer at a time
    c.train.max_skipped_updates = 3  # steps in a row with one not finite: then stop

    c.optimizer = ConfigDict()  # AdamW on float32 masters
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.optimizer.warmup_start = 0.1  # share of the peak at the first step
    c.optimizer.decay_steps = 0  # 0: constant; else cosine to 0 at this step
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.01
    c.optimizer.max_grad_norm = 1.0
    c.optimizer.mu_dtype = "float32"  # of the stored moments; bfloat16 is rounded
    c.optimizer.nu_dtype = "float32"  # stochastically

    c.sampling = ConfigDict()
    c.sampling.temperature = 1.0
    c.sampling.max_new_tokens = 1024
    c.sampling.top_k = 0  # these three: not in training
    c.sampling.top_p = 1.0
    c.sampling.min_p = 0.0
    c.sampling.max_slots = 1024  # sequences that a device decodes at once
    c.sampling.decode_steps = 16  # between two looks at the queue
    c.sampling.prefill_tokens = 8192  # of a prefill, per device
    c.sampling.memory_fraction = 0.9  # of the free memory that KV pages may take

    c.validation = ConfigDict()
    c.validation.period = 10  # steps; 0: no validation at all
    c.validation.at_start = True
    c.validation.at_end = True
    c.validation.max_prompts = 256
    c.validation.batch_size = 64  # prompts sampled together
    c.validation.num_samples = 1  # per prompt; reports pass@k if above 1
    c.validation.temperature = 0.0
    c.validation.top_k = 0  # 0: all
    c.validation.top_p = 1.0
    c.validation.min_p = 0.0

    c.warm_start = ConfigDict()  # supervised, before GRPO
    c.warm_start.enabled = False
    c.warm_start.max_steps = 400
    c.warm_start.batch_size = 128
    c.warm_start.learning_rate = 2e-3
    c.warm_start.warmup_steps = 20
    c.warm_start.eval_period = 5  # steps between exact-match evaluations
    c.warm_start.stop_accuracy = 0.2  # stop at the first evaluation that reaches this
    c.warm_start.max_accuracy = 0.45  # beyond it there is too little left to learn:
    c.warm_start.min_accuracy = 0.2  # go back to the last evaluation above this

    c.grading = ConfigDict()
    c.grading.num_workers = 2
    c.grading.timeout_s = 10.0

    c.checkpoint = ConfigDict()
    c.checkpoint.period = 10  # steps; 0: only at the end and on SIGTERM
    c.checkpoint.keep = 2

    c.logging = ConfigDict()
    c.logging.tensorboard = True
    c.logging.samples_period = 10  # steps between printed completions; 0: never
    c.logging.num_samples = 2
    return c.lock()
