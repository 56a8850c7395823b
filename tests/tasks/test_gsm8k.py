import json
import os
import pathlib
import pickle
import re

import pytest

from fp8rl_jax.data.tokenizer import ByteTokenizer
from fp8rl_jax.tasks.base import DatasetError, SupervisedTask
from fp8rl_jax.tasks.gsm8k import INSTRUCTION, GSM8KConfig, GSM8KTask

ROW = {
    "question": "Two boxes hold 3 pens each. How many pens?",
    "answer": "There are 2*3 = <<2*3=6>>6 pens.\n#### 6",
}


def write(path, *rows):
    rows = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    path.write_bytes(b"\n".join(rows))
    return str(path)


def make(tmp_path, *rows, **kwargs):
    path = write(tmp_path / "train.jsonl", *rows)
    held_out = write(tmp_path / "test.jsonl", ROW)
    return GSM8KTask(GSM8KConfig(path, held_out, **kwargs))


def test_chat_prompt_and_target(tmp_path):
    task = make(tmp_path, ROW)
    (example,) = task.train_source
    assert isinstance(task, SupervisedTask)
    assert example.id == "train:1"
    assert example.answer == "6"
    (message,) = example.prompt
    assert message["role"] == "user"
    assert message["content"] == f"{ROW['question']}\n\n{INSTRUCTION}"
    assert "####" in INSTRUCTION
    assert task.target(example) == "There are 2*3 = 6 pens.\n#### 6"


def test_plain_prompt(tmp_path):
    task = make(tmp_path, ROW, prompt_format="plain", instruction="Go.")
    tokens = task.render(task.train_source[0], ByteTokenizer())
    assert bytes(tokens).decode() == f"{ROW['question']}\n\nGo."


def test_grade(tmp_path):
    task = make(tmp_path, ROW)
    grade = pickle.loads(pickle.dumps(task.grade))
    assert grade(task.train_source[0], "So #### 6", [1]).reward == 1.0
    assert grade(task.train_source[0], "So #### 7", [1]).reward == 0.0
    # The task's data do not travel with the grader.
    assert len(pickle.dumps(task.grade)) < 200


def test_tolerated_rows(tmp_path):
    bom = b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r"
    separator = ROW | {"question": "a\u2028b"}
    task = make(
        tmp_path, bom, b"", json.dumps(separator, ensure_ascii=False).encode(), b" "
    )
    assert [e.id for e in task.train_source] == ["train:1", "train:3"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"question": "q", "answer"', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'["question"]', "not a JSON object"),
        ({"question": "q"}, "'answer' is missing"),
        ({"answer": "#### 1"}, "'question' is missing"),
        (ROW | {"question": " "}, "'question' is missing"),
        (ROW | {"answer": 6}, "'answer' is missing or not a text"),
        (ROW | {"answer": "6"}, "does not end with '#### <number>'"),
        (ROW | {"answer": "#### six"}, "does not end with '#### <number>'"),
    ],
)
def test_malformed_row_is_named(tmp_path, row, message):
    with pytest.raises(DatasetError, match=message) as e:
        make(tmp_path, ROW, row, ROW)
    assert f"{tmp_path / 'train.jsonl'}:2: " in str(e.value)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(DatasetError, match="no rows"):
        make(tmp_path)
    with pytest.raises(DatasetError, match=r"absent.jsonl: no such file"):
        GSM8KTask(GSM8KConfig(str(tmp_path / "absent.jsonl"), "x"))
    with pytest.raises(ValueError, match="prompt_format"):
        GSM8KConfig("a", "b", prompt_format="html")


@pytest.mark.skipif(
    "FP8RL_GSM8K" not in os.environ,
    reason="set FP8RL_GSM8K to a folder with GSM8K's train.jsonl and test.jsonl",
)
def test_real_data():
    folder = pathlib.Path(os.environ["FP8RL_GSM8K"])
    task = GSM8KTask(
        GSM8KConfig(str(folder / "train.jsonl"), str(folder / "test.jsonl"))
    )
    assert (len(task.train_source), len(task.validation_source)) == (7473, 1319)
    for example in [*task.train_source, *task.validation_source]:
        target = task.target(example)
        assert "<<" not in target
        assert task.grade(example, target, []).reward == 1.0
        value = int(re.sub("[,$]", "", example.answer))
        assert task.grade(example, f"#### {value + 1}", []).reward == 0.0
