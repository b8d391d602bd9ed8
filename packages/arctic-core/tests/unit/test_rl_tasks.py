"""Tasks are pure functions of (seed, step); rewards are checked."""

import math
import sys

import pytest

from arctic_core.errors import ConfigError, RewardError
from arctic_core.plugins.manager import get_registry
from arctic_core.rl.tasks import TaskItem, create_addition, derive_seed, last_number, load_reward, score

SUMS = {
    "dataset": "basic_arithmetic",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"], "allow_negation": False},
    "answer": "last_number",
    "partial_credit": False,
    "bare_bonus": 0.2,
}


def tasks():
    pytest.importorskip("reasoning_gym")
    registry = get_registry()
    return [registry.task("addition").create({}), registry.task("reasoning_gym").create(SUMS)]


def test_prompts_depend_on_seed_and_step_alone():
    for task, twin in zip(tasks(), tasks(), strict=True):
        twin.prompts(9, 9, 4)  # an earlier call leaves no trace
        first = task.prompts(1, 2, 4)
        assert [item.messages for item in first] == [item.messages for item in twin.prompts(1, 2, 4)]
        assert [item.messages for item in first] != [item.messages for item in task.prompts(2, 2, 4)]
        assert [item.messages for item in first] != [item.messages for item in task.prompts(1, 3, 4)]


def test_neighbouring_seeds_share_no_stretch_of_questions():
    task = tasks()[1]
    questions = [[item.messages[-1]["content"] for item in task.prompts(seed, 0, 60)] for seed in (0, 1)]
    assert not any(questions[0][shift : shift + 20] == questions[1][:20] for shift in range(40))


def test_the_right_answer_is_worth_most():
    for task in tasks():
        item = task.prompts(0, 0, 1)[0]
        wrong = str(int(item.answer) + 1)
        assert task.reward(item.answer, item) == pytest.approx(1.2)
        assert task.reward(f" {item.answer}\n", item) == pytest.approx(1.2)
        assert task.reward(f"The answer is {item.answer}.", item) == 1.0
        assert task.reward(wrong, item) == pytest.approx(0.2)
        assert task.reward(f"{item.answer} or {wrong}", item) == 0.0
        assert task.reward("no idea", item) == 0.0
        assert task.reward("", item) == 0.0


def test_answers_are_extracted_as_asked():
    pytest.importorskip("reasoning_gym")
    create = get_registry().task("reasoning_gym").create
    tagged = create({**SUMS, "answer": "tag", "bare_bonus": 0})
    item = tagged.prompts(0, 0, 1)[0]
    assert tagged.reward(f"so <answer>1</answer>, no: <answer> {item.answer} </answer>", item) == 1.0
    assert tagged.reward(item.answer, item) == 0.0
    text = create({**SUMS, "answer": "text", "partial_credit": True, "bare_bonus": 0})
    assert 0 < text.reward(f"it is {item.answer}", item) < 1
    assert text.reward(item.answer, item) == 1.0


def test_the_system_prompt_is_optional():
    asked = create_addition({"system_prompt": None}).prompts(0, 0, 1)[0].messages
    assert [message["role"] for message in asked] == ["user"]
    asked = create_addition({}).prompts(0, 0, 1)[0].messages
    assert [message["role"] for message in asked] == ["system", "user"]


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("addition", {"max_operant": 3}, "max_operant"),
        ("reasoning_gym", {}, "dataset"),
        ("reasoning_gym", {"dataset": "no_such_dataset"}, "no_such_dataset"),
        ("reasoning_gym", {"dataset": "basic_arithmetic", "config": {"min_termss": 1}}, "min_termss"),
        ("reasoning_gym", {"dataset": "basic_arithmetic", "config": {"min_terms": 0}}, "min_terms"),
    ],
)
def test_wrong_options_fail_at_once(name, options, named):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=named):
        get_registry().task(name).create(options)


@pytest.mark.parametrize(
    ("text", "number"),
    [("3 + 4 = 7.", "7"), ("-3", "-3"), ("1,234", "1234"), ("1, 2", "2"), ("2.50 kg", "2.50"), ("none", None), ("", None)],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_derived_seeds_are_stable_and_spread():
    assert derive_seed("rollout", 0, 0) == derive_seed("rollout", 0, 0)
    assert derive_seed("rollout", 1, 11) != derive_seed("rollout", 11, 1)
    seeds = {derive_seed("rollout", seed, step) for seed in range(30) for step in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed("rollout", 0, 0) == 1985682961  # changing it would break resuming older runs


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "much"])
def test_a_reward_that_is_no_number_names_the_sample(value):
    with pytest.raises(RewardError, match="sample 5"):
        score(lambda completion, item: value, "text", TaskItem((), ""), 5)


def test_a_reward_that_raises_names_the_sample():
    with pytest.raises(RewardError, match=r"sample 2.*ZeroDivisionError") as caught:
        score(lambda completion, item: 1 / 0, "text", TaskItem((), ""), 2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_booleans_are_rewards():
    assert score(lambda completion, item: True, "text", TaskItem((), ""), 0) == 1.0


def test_a_reward_is_found_by_its_dotted_name(tmp_path, monkeypatch):
    source = "class Kind:\n    @staticmethod\n    def length(completion, item):\n        return len(completion)\n"
    (tmp_path / "my_rewards_for_a_test.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert load_reward("my_rewards_for_a_test:Kind.length")("four", None) == 4
    assert sys.path == path


@pytest.mark.parametrize("name", ["no_colon", ":f", "m:", "no_such_module_at_all:f", "math:no_such_function", "math:pi"])
def test_a_wrong_dotted_name_is_an_error(name):
    with pytest.raises(ConfigError):
        load_reward(name)
