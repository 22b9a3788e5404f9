"""Demonstrations come from the real workflows, and the warm start trains on their replies only."""

import json
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradscope.errors import ConfigError
from gradscope.train.assets.demonstrations import Demonstrator, Noise, demonstrations
from gradscope.train.assets.experts import EXPERTS
from gradscope.train.assets.measure import as_rows, measure, table
from gradscope.train.assets.model import TINY, build_model
from gradscope.train.assets.sampler import sample
from gradscope.train.assets.tokenizer import build_tokenizer
from gradscope.train.assets.warm_start import Recipe, batches, encode, train
from gradscope.train.episode import Message
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS

CLEAN = Noise(operation=0, digit=0, choice=0, strategy_right=1, off_role=0)
EQUAL_WEIGHTS = dict.fromkeys(WORKFLOWS.names(), 1.0)


def demonstrator(name, noise, weights=EQUAL_WEIGHTS):
    return Demonstrator(name, TASKS.get(name)(), noise, weights, Random(0))


@pytest.mark.parametrize("name", EXPERTS)
def test_an_expert_is_right_by_one_strategy_and_wrong_by_the_other_where_it_matters(name):
    task = TASKS.get(name)()
    problems = [task.problem("train", index) for index in range(200)]
    for problem in problems:
        assert task.grade(problem, EXPERTS[name].solve(problem.short, "L"))
        if "-" not in problem.short:
            assert task.grade(problem, EXPERTS[name].solve(problem.short, "R"))
    right = sum(task.grade(problem, EXPERTS[name].solve(problem.short, "R")) for problem in problems)
    assert 0.1 * len(problems) < right < 0.7 * len(problems)


@pytest.mark.parametrize("name", EXPERTS)
def test_mistakes_come_at_the_given_rate_and_keep_the_length(name):
    solution = {"stack_code": "ab" + "+" * 4000, "arithmetic": "5" * 4000}[name]
    spoiled = EXPERTS[name].spoil(solution, 0.2, Random(0))
    wrong = sum(a != b for a, b in zip(solution, spoiled, strict=True))
    assert 0.17 * 4000 < wrong < 0.23 * 4000
    assert EXPERTS[name].spoil(solution, 0.0, Random(0)) == solution


@pytest.mark.parametrize("name", EXPERTS)
def test_without_noise_every_role_is_right_and_in_format(name):
    player = demonstrator(name, CLEAN)
    for index in range(60):
        problem = player.task.problem("train", index)
        for demonstration in player.episode(index):
            role = demonstration.messages[0].content
            assert demonstration.messages[1].content.split("|")[0] == problem.short
            expected = {"aggregator": "123", "evaluator": ["y"], "orchestrator": ["LLL"]}.get(role)
            if expected is None:
                assert player.task.grade(problem, demonstration.reply)
            else:
                assert demonstration.reply in expected


def test_an_evaluator_points_at_the_first_wrong_character():
    player = demonstrator("stack_code", Noise(operation=1, digit=0, choice=0, off_role=0), {"eval_opt": 1.0})
    for index in range(30):
        by_role = {d.messages[0].content: d for d in player.episode(index)}
        problem, answer = by_role["evaluator"].messages[1].content.split("|")
        clean = EXPERTS["stack_code"].solve(problem, "L")
        first = next(k for k, (a, b) in enumerate(zip(answer, clean, strict=True), start=1) if a != b)
        graded = player.task.grade(player.task.problem("train", index), answer)
        assert by_role["evaluator"].reply == ("y" if graded else f"n{first}")


def test_demonstrations_cover_both_tasks_and_all_roles():
    stream = demonstrations(
        difficulty={"stack_code": 3, "arithmetic": 3},
        spread={"stack_code": 2, "arithmetic": 2},
        noise=Noise(),
        workflow_weights=EQUAL_WEIGHTS,
        seed=1,
    )
    some = list(islice(stream, 500))
    assert {d.messages[0].content for d in some} == {
        "generator", "aggregator", "evaluator", "orchestrator", "worker", "synthesizer",
    }  # fmt: skip
    assert all(len(d.reply) <= 24 for d in some)


def test_noise_outside_its_range_is_refused():
    with pytest.raises(ConfigError, match=r"noise choice is 1.5"):
        Noise(choice=1.5)


def test_only_replies_and_their_end_are_trained_on():
    tokenizer = build_tokenizer()
    ids, labels = next(batches(tokenizer, Recipe(batch_size=16), seed=0))
    assert ids.shape == labels.shape == (16, ids.shape[1])
    for row, target in zip(ids.tolist(), labels.tolist(), strict=True):
        kept = [token for token in target if token != -100]
        start = target.index(kept[0])
        assert row[start : start + len(kept)] == kept
        assert kept[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(row[:start]).endswith(">")
        assert ">" not in tokenizer.decode(kept[:-1])
        assert set(row[start + len(kept) :]) <= {tokenizer.pad_token_id}


def test_encode_says_where_the_prompt_ends():
    player = demonstrator("arithmetic", CLEAN, {"single": 1.0})
    (demonstration,) = player.episode(0)
    tokenizer = build_tokenizer()
    ids, num_prompt = encode(tokenizer, demonstration)
    assert tokenizer.decode(ids[:num_prompt]) == f"<G>{demonstration.messages[1].content}>"
    assert tokenizer.decode(ids[num_prompt:]) == f"{demonstration.reply}<end>"


def test_the_warm_start_is_a_function_of_its_seed(tmp_path):
    recipe = Recipe(steps=3, batch_size=16)
    first, again = (train(recipe, seed=0, out=tmp_path).state_dict() for _ in range(2))
    other = train(recipe, seed=1, out=tmp_path).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    recipe = Recipe(steps=1000, warm_up=50, learning_rate=1.0)
    assert recipe.rate_at(0) == pytest.approx(0.02)
    assert recipe.rate_at(49) == recipe.rate_at(50) == 1.0
    assert recipe.rate_at(1000) == pytest.approx(0.1)
    assert replace(recipe, steps=50).rate_at(49) == 1.0


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32
    ).eval(), AutoTokenizer.from_pretrained(TINY)


def test_the_shipped_model_is_small_and_fits_its_script(tiny):
    model, tokenizer = tiny
    assert 80_000 < sum(parameter.numel() for parameter in model.parameters()) < 130_000
    assert (TINY / "model.safetensors").stat().st_size < 500_000
    built = build_model(seed=0)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in built.state_dict().items()
    }
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert tokenizer.chat_template == build_tokenizer().chat_template


def test_the_report_beside_the_weights_states_the_recipe_and_meets_the_targets():
    report = json.loads((TINY / "warm_start.json").read_text())
    recipe = Recipe()
    assert json.loads(json.dumps({**vars(recipe), "noise": vars(recipe.noise)})) == report["recipe"]
    cells = {(row["workflow"], row["task"]): row for row in report["accuracy"]}
    assert len(cells) == 2 * len(WORKFLOWS.names())
    for (workflow, task), row in cells.items():
        low, high = (0.3, 0.6) if workflow == "single" else (0.2, 0.7)
        assert low <= row["sampled"] <= high, (workflow, task)
        assert row["mixed_groups"] >= 0.4, (workflow, task)


@pytest.mark.parametrize("name", EXPERTS)
def test_the_shipped_weights_give_the_reported_greedy_accuracy(tiny, name):
    report = json.loads((TINY / "warm_start.json").read_text())
    (row,) = (row for row in report["accuracy"] if (row["workflow"], row["task"]) == ("single", name))
    again = measure("single", name, TASKS.get(name)(), *tiny, num_problems=report["num_problems"])
    assert again.greedy == pytest.approx(row["greedy"], abs=0.01), "a near tie may fall otherwise elsewhere"
    assert again.sampled == pytest.approx(row["sampled"], abs=0.03), (
        "streams of other torch builds may differ"
    )
    assert table([again]).splitlines()[1].split()[:2] == ["single", name]
    assert as_rows([again])[0]["task"] == name


def test_greedy_sampling_does_not_depend_on_its_batch(tiny):
    prompts = [
        (Message("system", "generator"), Message("user", text))
        for text in ("a+2", "12+34", "a+3*b-2*5-1", "b-1*7")
    ]
    stream = torch.Generator().manual_seed(0)
    together = sample(*tiny, prompts, temperature=0, max_new_tokens=16, generator=stream)
    apart = [sample(*tiny, [p], temperature=0, max_new_tokens=16, generator=stream)[0] for p in prompts]
    assert together == apart
    assert all(reply for reply in together)
