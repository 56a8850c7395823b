"""The numeric grader against hand-made verdicts."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.tasks.graders import MAX_CHARS, find_answer, grade_number
from fp8rl_jax.tasks.numeric import last_number, parse_number

# Completion and the reference answer that it equals.
RIGHT = [
    # The `####` marker.
    ("#### 42", "42"),
    ("####42", "42"),
    ("####  42", "42"),
    ("#### 42.", "42"),
    ("#### 42,", "42"),
    ("#### 42;", "42"),
    ("#### 42!", "42"),
    ("#### 42.00", "42"),
    ("#### 007", "7"),
    ("#### .5", "1/2"),
    ("#### 1,234", "1234"),
    ("#### 2,000,000", "2000000"),
    ("#### 1e3", "1000"),
    ("#### -3", "-3"),
    ("#### - 3", "-3"),
    ("#### \u22127", "-7"),
    ("#### +5", "5"),
    ("#### -1,234.50", "-1234.5"),
    ("#### 3/4", "0.75"),
    ("#### 1 1/2", "1.5"),
    ("#### **42**", "42"),
    ("#### -**5**", "-5"),
    ("#### (42)", "42"),
    (r"#### \boxed{42}", "42"),
    ("#### x = 7", "7"),
    ("#### 16/4 = 4", "4"),
    ("#### 42 (6*7 = 42)", "42"),
    ("#### $80,000", "80000"),
    ("#### $-5", "-5"),
    ("#### -$5", "-5"),
    (r"#### \$5", "5"),
    ("#### €42", "42"),
    ("#### 42 dollars", "42"),
    ("#### 5km/h", "5"),
    ("#### 5/hour", "5"),
    ("#### 90°", "90"),
    ("#### 5th", "5"),
    ("#### 42. So it is not 43.", "42"),
    ("#### 42" + "x" * 400, "42"),
    ("#### 42\n" + "And 7 more. " * 40, "42"),
    ("#### 41\n#### 42", "42"),
    ("#### 42\n#### 42", "42"),
    ("#### 42\n##### 43", "42"),  # Five make no marker.
    ("#### Step 2: 3 boxes\nSo \\boxed{42}", "42"),  # A heading.
    ("#### Result\n42", "42"),
    # Boxes.
    (r"\boxed{4} wait no, \boxed{5}", "5"),
    (r"\boxed {5}", "5"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{5}. Check: 7 \cdot 1 = 7", "5"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{-\frac{1}{2}}", "-0.5"),
    (r"\boxed{\dfrac12}", "0.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{42\text{ cm}^2}", "42"),
    (r"\boxed{42\ \mathrm{cm}^{2}}", "42"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{90^{\circ}}", "90"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{\$1{,}234.50}", "1234.5"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{5} and then \boxed{3", "5"),  # The last balanced one.
    # "Answer:".
    ("**Answer:** 34", "34"),
    ("**Final Answer**: 42 apples", "42"),
    ("Answer: 0.5", r"\frac{1}{2}"),
    ("Answer:\n42", "42"),
    ("The answer is: 42", "42"),
    ("答案 Answer：42", "42"),
    ("Answer: 41\nAnswer: 42", "42"),
    ("Answer: 42. I added 3 and 39.", "42"),
    # The last number.
    ("72 clips, altogether.", "72"),
    ("The total is $80,000.", "80000"),
    ("a+b = 3+4 = 7", "7"),
    ("x=5", "5"),
    ("073", "73"),
    (r"so it is \(42\).", "42"),
    ("$42$", "42"),
    ("10 - 3", "3"),
    ("10-3", "3"),
    ("共42个", "42"),
    ("it is...5", "5"),
    # Thinking.
    ("<think>#### 41</think>So #### 42", "42"),
    ("#### 41</think>42", "42"),
    # Policy: a percent sign is a unit.
    ("#### 42%", "42"),
    ("#### 42", "42%"),
]

# Completion and a reference answer that it does not equal.
WRONG = [
    ("", "1"),
    ("no number", "1"),
    ("#### -3", "3"),
    ("#### 3", "-3"),
    ("#### 4242", "42"),
    ("#### 4", "42"),
    ("#### 3 4", "34"),
    ("3 4", "34"),
    ("3 4", "3"),
    ("2,3", "2"),
    ("2,3", "3"),
    ("2,3", "23"),
    ("0/0", "1"),
    ("0.25", "1/2"),
    ("a+b = 3+4 = 7", "3"),
    ("a+b = 3+4 = 7", "4"),
    # Several values, expressions and comparisons after a marker.
    ("#### 3 or 4", "3"),
    ("#### 3 or 4", "4"),
    ("#### 3, 4", "3"),
    ("#### 10-20", "10"),
    ("#### 10-20", "20"),
    ("#### 6*7", "42"),
    ("#### 6*7", "6"),
    ("#### 3+4", "7"),
    ("#### 3+4", "4"),
    ("#### >5", "5"),
    (r"\boxed{x >= 5}", "5"),
    (r"\boxed{x \ge 5}", "5"),
    ("#### 5 hours and 30 minutes", "5"),
    ("#### 3.1.4", "3"),
    ("#### 1/2/2023", "1"),
    ("#### 12,34", "1234"),
    ("#### 1e999999999", "1"),
    ("#### 10^2", "10"),
    ("#### 10²", "10"),
    ("#### 10²", "102"),
    ("50 cm^2", "2"),
    ("x2", "2"),
    (r"\boxed{x-3}", "3"),
    (r"\boxed{x-3}", "-3"),
    (r"\boxed{2x}", "2"),
    (r"\boxed{4\sqrt{2}}", "4"),
    (r"$4\sqrt(2)$", "4"),
    (r"\boxed{2\pi}", "2"),
    (r"\boxed{1, 2}", "2"),
    (r"\boxed{(1,2)}", "1"),
    (r"\boxed{9^{9^{9^{9}}}}", "1"),
    (r"\boxed{0.1000001}", "0.1"),
    (r"\boxed{1.41421356}", "1.4142136"),
    # Malformed markers end the search.
    (r"It is 3: \boxed{3", "3"),
    (r"\boxed{}, so 5", "5"),
    (r"\boxed{5}, \boxed{}", "5"),
    # Thinking.
    ("<think>#### 42", "42"),
    ("#### 42</think>so", "42"),
    # Policies: percent never scales, number words neither.
    ("#### 50%", "0.5"),
    ("#### 3 million", "3000000"),
    # Text is never evaluated.
    ("#### __import__('os')._exit(0)", "1"),
    ("#### 10**10**10", "10"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right(completion, answer):
    grade = grade_number(completion, answer)
    assert (grade.reward, grade.correct) == (1.0, True)
    assert grade.components["answer_found"] == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong(completion, answer):
    grade = grade_number(completion, answer)
    assert (grade.reward, grade.correct) == (0.0, False)


@pytest.mark.parametrize(
    ("completion", "marker"),
    [
        ("#### 1", "####"),
        (r"Answer: 2, #### none, \boxed{1}", "boxed"),
        ("It is 2. Answer: 1", "answer"),
        ("It is 1", "last_number"),
        ("nothing", "none"),
    ],
)
def test_marker(completion, marker):
    assert find_answer(completion).marker == marker
    marked = grade_number(completion, "1").components["answer_marked"]
    assert marked == float(marker in ("####", "boxed", "answer"))


def test_reference_must_be_a_number():
    with pytest.raises(ValueError, match="'seven' is not a number"):
        grade_number("7", "seven")


HOSTILE = [
    "{",
    "}",
    r"\boxed{",
    r"\boxed{1",
    r"\text{",
    r"\frac{1}{",
    "####",
    "#### 1 ",
    "#### \n",
    "answer:",
    "answer: ",
    "answer:\n1",
    "</think>",
    "-",
    "$",
    "**",
    " ",
    "1",
    "1,",
    "1,111",
    "1.1",
    "1/1 ",
    "1e",
    "=1",
    "[(",
    "^{",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("prefix", ["", "#### ", "#### 1 ", r"\boxed{", "answer: "])
def test_hostile_input_is_wrong_and_quick(prefix, piece):
    text = prefix + piece * ((MAX_CHARS // 4 - len(prefix)) // len(piece))
    start = time.perf_counter()
    assert not grade_number(text, "31337").correct
    # Linear: about 0.02 s. Quadratic: minutes.
    assert time.perf_counter() - start < 5.0


def test_too_long_input_is_wrong():
    text = "#### 42 " + "x" * MAX_CHARS
    assert grade_number(text[:MAX_CHARS], "42").correct
    assert not grade_number(text, "42").correct


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=" \n#0123456789.,-+/=$%*^_{}()[]<>\\boxedfracanswer:eE²−é"))
def test_never_raises(text):
    grade_number(text, "1")


@settings(deadline=None, max_examples=200)
@given(st.integers(), st.integers(0, 10**6 - 1), st.booleans())
def test_decimals_are_exact(whole, millionths, commas):
    text = f"{whole:,}" if commas else f"{whole}"
    value = abs(whole) + Fraction(millionths, 10**6)
    if text.startswith("-"):
        value = -value
    text = f"{text}.{millionths:06d}"
    if len(text.lstrip("-")) <= 64:
        assert parse_number(text) == last_number(f"It is {text}.") == value
