"""When the supervised phase ends, and what it imitates."""

import types

import numpy as np
import pytest

from fp8rl_jax.config import base_config
from fp8rl_jax.console import Reporter
from fp8rl_jax.data.layout import lay_out_rows
from fp8rl_jax.data.prompts import tokenize_prompts
from fp8rl_jax.data.tokenizer import ByteTokenizer
from fp8rl_jax.learner import UpdateResult
from fp8rl_jax.metrics import MetricWriter
from fp8rl_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask, Level
from fp8rl_jax.warm_start import WarmStartError, warm_start

TOKENIZER = ByteTokenizer()


class CountingLearner:
    """Parameters are the number of updates; records the batches."""

    def __init__(self, finite=1.0):
        self.finite = finite
        self.batches = []

    def init(self, params):
        return types.SimpleNamespace(params=params)

    def quantize(self, params):
        return f"codes of {params}"

    def put(self, batch):
        return batch

    def update(self, state, codes, batch, inputs, count):
        assert count == len(batch.tokens)
        assert codes == f"codes of {state.params}"
        self.batches.append((batch, inputs))
        state = types.SimpleNamespace(params=state.params + 1)
        metrics = {"loss": np.float32(1.0), "finite": np.float32(self.finite)}
        return UpdateResult(state, self.quantize(state.params), metrics, None)

    def rollout_weights(self, params, codes):
        assert codes == f"codes of {params}"
        return params


class Sink:
    def __init__(self):
        self.lines = []

    def write(self, step, metrics):
        self.lines.append((step, dict(metrics)))

    def close(self):
        pass


class Run:
    """A warm start whose accuracy after n steps is ``accuracy(n)``."""

    def __init__(self, accuracy, learner=None, stop_at=None, task=None, **options):
        config = base_config()
        config.train.micro_batch_size = 4
        config.warm_start.batch_size = 8
        config.warm_start.eval_period = 5
        config.warm_start.max_steps = 20
        config.warm_start.stop_accuracy = 0.2
        config.warm_start.max_accuracy = 0.45
        for name, value in options.items():
            config.warm_start[name] = value
        self.learner = learner or CountingLearner()
        self.sink = Sink()
        task = task or ArithmeticTask(ArithmeticConfig((Level("+", 4),), 5))
        self.experiment = types.SimpleNamespace(
            config=config,
            task=task,
            tokenizer=TOKENIZER,
            train_prompts=tokenize_prompts(
                task.train_source, lambda e: task.render(e, TOKENIZER), 16
            ),
            warm_start_learner=lambda: self.learner,
            layout=lambda batch, mask: lay_out_rows(batch, mask, 4),
        )
        self.accuracy = accuracy
        self.stop_at = stop_at

    def __call__(self):
        with Reporter(20, "warm start") as reporter:
            return warm_start(
                self.experiment,
                0,
                self.accuracy,
                MetricWriter([self.sink]),
                reporter,
                lambda: len(self.learner.batches) == self.stop_at,
            )


def test_stops_at_the_first_evaluation_that_reaches_the_target():
    run = Run(lambda steps: steps / 50)
    assert run() == (10, 0.2)
    assert [step for step, _ in run.sink.lines] == list(range(1, 11))
    evaluated = {
        step: line["validation/accuracy"]
        for step, line in run.sink.lines
        if "validation/accuracy" in line
    }
    assert evaluated == {5: 0.1, 10: 0.2}


def test_imitates_the_answer_and_the_stop_token():
    run = Run(lambda steps: 0.3)
    run()
    (tokens, inputs) = run.learner.batches[0]
    assert tokens.tokens.shape[:2] == (2, 4)  # micro-batches, rows
    texts = []
    for row, targets, mask in zip(
        tokens.tokens.reshape(8, -1),
        tokens.targets.reshape(8, -1),
        inputs.mask.reshape(8, -1),
        strict=True,
    ):
        answer = targets[mask].tolist()
        assert answer.pop() == TOKENIZER.stop_ids[0]
        prompt = TOKENIZER.decode(row[: np.flatnonzero(mask)[0] + 1].tolist())
        texts.append(prompt + TOKENIZER.decode(answer))
    sums = {f"{a}+{b}={a + b}" for a in range(5) for b in range(5)}
    assert set(texts) <= sums and len(set(texts)) == 8


def test_goes_back_to_the_last_evaluation_if_one_jumps_beyond():
    accuracies = {5: 0.15, 10: 0.25, 15: 0.3, 20: 0.6}
    run = Run(accuracies.__getitem__, stop_accuracy=0.38)
    params, accuracy = run()
    assert (params, accuracy) == (15, 0.3)
    # From too little to too much in one go: nothing to go back to.
    accuracies = {5: 0.15, 10: 0.6}
    with pytest.raises(WarmStartError, match="jumped to 60"):
        Run(accuracies.__getitem__, stop_accuracy=0.38)()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(lambda steps: 0.5), r"jumped to 50.0%, beyond warm_start.max_accuracy"),
        (Run(lambda steps: 0.1), "did not reach 20% in 20 steps"),
        (Run(lambda steps: 0.3, max_steps=4), "did not reach 20% in 4 steps"),
    ],
)
def test_ends_where_grpo_has_nothing_to_learn(run, message):
    with pytest.raises(WarmStartError, match=message):
        run()


def test_told_to_stop():
    run = Run(lambda steps: 0.1, stop_at=7)
    assert run() is None
    assert len(run.learner.batches) == 7


def test_non_finite_loss():
    run = Run(lambda steps: 0.3, CountingLearner(finite=0.0))
    with pytest.raises(FloatingPointError, match="non-finite loss at step 1"):
        run()


def test_a_task_without_answers():
    class Wordless:
        name = "wordless"
        train_source = validation_source = ArithmeticTask().train_source
        render = ArithmeticTask.render
        grade = ArithmeticTask.grade

    with pytest.raises(WarmStartError, match="'wordless' has no answers to imitate"):
        Run(lambda steps: 0.3, task=Wordless())()
