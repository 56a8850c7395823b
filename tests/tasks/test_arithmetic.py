import pytest

from fp8rl_jax.data.tokenizer import ByteTokenizer
from fp8rl_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask, Level
from fp8rl_jax.tasks.base import SupervisedTask


def prompts(source):
    return [e.prompt for e in source]


def test_default_problems():
    task = ArithmeticTask()
    assert isinstance(task, SupervisedTask)
    train, validation = prompts(task.train_source), prompts(task.validation_source)
    assert 200 <= len(validation) <= 201
    everything = [f"{a}+{b}=" for a in range(20) for b in range(20)]
    assert sorted(train + validation) == sorted(everything)
    # Held out in both orders.
    swapped = {"{1}+{0}=".format(*p.rstrip("=").split("+")) for p in validation}
    assert swapped == set(validation)


def test_split_without_commuted_pairs():
    task = ArithmeticTask(ArithmeticConfig(hold_out_commuted=False))
    train, validation = prompts(task.train_source), prompts(task.validation_source)
    assert len(validation) == 200
    assert len(set(train) | set(validation)) == 400


def test_split_depends_on_the_seed_only():
    validation = [
        prompts(ArithmeticTask(ArithmeticConfig(seed=seed)).validation_source)
        for seed in (0, 0, 1)
    ]
    assert validation[0] == validation[1] != validation[2]


def test_answers_and_levels():
    levels = (Level("+", 3), Level("+-*", 5))
    task = ArithmeticTask(ArithmeticConfig(levels, num_validation=20))
    problems = {e.prompt: e for e in [*task.train_source, *task.validation_source]}
    assert len(problems) == 3 * 36
    assert (problems["2-5="].answer, problems["4*5="].answer) == ("-3", "20")
    assert problems["3+3="].metadata["level"] == 0
    assert problems["3+4="].metadata["level"] == 1
    assert problems["3-3="].metadata["level"] == 1


def test_grade_and_target():
    task = ArithmeticTask()
    example = next(e for e in task.train_source if e.answer == "22")
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(task.render(example, tokenizer)) == example.prompt
    assert task.target(example) == "22"
    for text, reward in [("22", 1.0), ("22 ", 1.0), ("2", 0.0), ("222", 0.0), ("", 0)]:
        grade = task.grade(example, text, [])
        assert (grade.reward, grade.correct) == (reward, bool(reward))


def test_bad_configurations():
    with pytest.raises(ValueError, match="cannot hold out 400 of 400"):
        ArithmeticTask(ArithmeticConfig(num_validation=400))
    with pytest.raises(ValueError, match="operators"):
        Level("/")
    with pytest.raises(ValueError, match="max_operand"):
        Level("+", -1)
