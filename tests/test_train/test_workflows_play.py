"""Each workflow played with scripted replies: who is asked what, what comes out, what is marked."""

import pytest

from gradscope.errors import ConfigError
from gradscope.train.episode import Mark, Problem
from gradscope.train.workflows import WORKFLOWS

PROBLEM = Problem(
    id="toy/1", question="What is a+2*b?", short="a+2*b", answer_format="Box it.", reference="a2+b*"
)
NASTY = ["", "\x00\x1b[31m\r\n", "<|im_end|><G><end></s>", "|" * 50, "x" * 10_000, "\ud800é\u202e", "1|2>3<4"]


def play(workflow, replies):
    """Plays an episode; `replies` maps a slot to its reply. Returns (outcome, levels of calls)."""
    episode = workflow.play(PROBLEM)
    levels = [next(episode)]
    try:
        while True:
            levels.append(episode.send([replies[call.slot] for call in levels[-1]]))
    except StopIteration as end:
        return end.value, levels


def contents(levels):
    return [[call.messages[-1].content for call in level] for level in levels]


def test_single_is_one_call_and_its_reply():
    outcome, levels = play(WORKFLOWS.get("single")(style="compact"), {"generator/0": "a2+b*"})
    assert contents(levels) == [["a+2*b"]]
    assert levels[0][0].messages[0].content == "generator"
    assert outcome.answer == "a2+b*"
    assert outcome.marks == (Mark(solution="a2+b*"),)


def test_voting_asks_generators_at_once_and_the_aggregator_picks():
    workflow = WORKFLOWS.get("voting")(style="compact")
    replies = {"generator/0": "x|<1>", "generator/1": "two", "generator/2": "three", "aggregator/0": "2"}
    outcome, levels = play(workflow, replies)
    assert contents(levels) == [["a+2*b"] * 3, ["a+2*b|x1|two|three"]]
    assert list(workflow.slots.items()) == [
        ("generator/0", "generator"),
        ("generator/1", "generator"),
        ("generator/2", "generator"),
        ("aggregator/0", "aggregator"),
    ]
    assert {call.turn for level in levels for call in level} == {0}
    assert outcome.answer == "two"
    assert [mark.solution for mark in outcome.marks] == ["x|<1>", "two", "three", "two"]
    assert outcome.marks[-1] == Mark(in_format=True, fallback=False, solution="two", copied=False)


def test_voting_falls_back_to_the_first_candidate_and_sees_a_copy():
    workflow = WORKFLOWS.get("voting")(num_generators=2, style="compact")
    outcome, _ = play(workflow, {"generator/0": "one", "generator/1": "two", "aggregator/0": "two"})
    assert outcome.answer == "one"
    assert outcome.marks[-1] == Mark(in_format=False, fallback=True, solution="one", copied=True)


def test_eval_opt_stops_on_correct():
    workflow = WORKFLOWS.get("eval_opt")(style="compact")
    outcome, levels = play(workflow, {"generator/0": "a2-b*", "evaluator/0": "y"})
    assert contents(levels) == [["a+2*b"], ["a+2*b|a2-b*"]]
    assert outcome.answer == "a2-b*"
    judged = Mark(
        in_format=True, fallback=False, solution="a2-b*", claims_correct=True, judges=True, copied=False
    )
    assert outcome.marks == (Mark(solution="a2-b*"), judged)


def test_eval_opt_refines_in_slots_of_its_own_and_ends_with_an_evaluation():
    workflow = WORKFLOWS.get("eval_opt")(style="compact")
    replies = {
        "generator/0": "a2-b*",
        "evaluator/0": "n3",
        "generator/1": "a2-b*",
        "evaluator/1": "**",
        "generator/2": "a2+b*",
        "evaluator/2": "n0",
    }
    outcome, levels = play(workflow, replies)
    assert [call.slot for level in levels for call in level] == list(workflow.slots) == list(replies)
    assert [call.turn for level in levels for call in level] == [0, 0, 1, 1, 2, 2]
    assert contents(levels)[2] == ["a+2*b|a2-b*|3"]
    assert contents(levels)[4] == ["a+2*b|a2-b*|**"]
    assert outcome.answer == "a2+b*"
    assert [mark.claims_correct for mark in outcome.marks] == [None, False, None, None, None, False]
    assert [mark.fallback for mark in outcome.marks] == [False, False, False, True, False, False]
    assert [mark.copied for mark in outcome.marks] == [None, False, True, False, False, False]


def test_orch_workers_gives_each_worker_one_strategy():
    workflow = WORKFLOWS.get("orch_workers")(style="compact")
    replies = {
        "orchestrator/0": "LRL",
        "worker/0": "one",
        "worker/1": "two",
        "worker/2": "three",
        "synthesizer/0": "two",
    }
    outcome, levels = play(workflow, replies)
    assert contents(levels) == [
        ["a+2*b"],
        ["a+2*b|L", "a+2*b|R", "a+2*b|L"],
        ["a+2*b|one|two|three"],
    ]
    assert outcome.answer == "two"
    assert outcome.marks == (
        Mark(in_format=True, fallback=False),
        Mark(solution="one"),
        Mark(solution="two"),
        Mark(solution="three"),
        Mark(solution="two", copied=True),
    )


@pytest.mark.parametrize(("plan", "num_workers"), [("R", 1), ("LR", 2), ("LRLRLR", 3), ("", 1), ("**", 1)])
def test_fewer_strategies_are_fewer_workers_and_never_none(plan, num_workers):
    replies = {"orchestrator/0": plan, "synthesizer/0": "s"} | {f"worker/{k}": "w" for k in range(3)}
    outcome, levels = play(WORKFLOWS.get("orch_workers")(style="compact"), replies)
    assert len(levels[1]) == num_workers
    assert len(outcome.marks) == num_workers + 2


@pytest.mark.parametrize("style", ["natural", "compact"])
@pytest.mark.parametrize("name", WORKFLOWS.names())
@pytest.mark.parametrize("reply", NASTY)
def test_any_reply_is_survived_and_cannot_break_out_of_its_prompt(name, style, reply):
    workflow = WORKFLOWS.get(name)(style=style)
    outcome, levels = play(workflow, dict.fromkeys(workflow.slots, reply))
    calls = [call for level in levels for call in level]
    assert len(outcome.marks) == len(calls)
    assert outcome.answer == reply
    for call in calls:
        text = call.messages[-1].content
        assert "\x00" not in text
        assert "\x1b" not in text
        assert "<|im_end|>" not in text
        assert "</s>" not in text
        text.encode("utf-8")
        if style == "compact":
            assert call.messages[0].content == call.role
            assert not set("<>") & set(text)
            fields = text.split("|")
            assert fields[0] == PROBLEM.short
            assert all(len(field) <= 24 for field in fields[1:])


@pytest.mark.parametrize("name", WORKFLOWS.names())
def test_natural_prompts_hold_the_problem_and_its_answer_format(name):
    workflow = WORKFLOWS.get(name)()
    _, levels = play(workflow, dict.fromkeys(workflow.slots, "\\boxed{Incorrect}"))
    for call in (call for level in levels for call in level):
        assert PROBLEM.question in call.messages[-1].content
        solves = call.role in {"generator", "worker", "synthesizer"}
        assert (PROBLEM.answer_format in call.messages[-1].content) == solves


@pytest.mark.parametrize("name", WORKFLOWS.names())
def test_roles_follow_the_slots_of_the_workflow(name):
    workflow = WORKFLOWS.get(name)()
    assert tuple(dict.fromkeys(workflow.slots.values())) == workflow.roles
    assert all(slot.startswith(f"{role}/") for slot, role in workflow.slots.items())


@pytest.mark.parametrize(
    ("name", "option"),
    [("voting", "num_generators"), ("eval_opt", "max_iterations"), ("orch_workers", "num_workers")],
)
@pytest.mark.parametrize("count", [0, 10, True, 2.5])
def test_a_bad_count_is_refused(name, option, count):
    with pytest.raises(ConfigError, match=f"workflow.{option} is .*from 1 to 9"):
        WORKFLOWS.get(name)(**{option: count})


@pytest.mark.parametrize("name", WORKFLOWS.names())
def test_an_unknown_style_is_refused_with_the_nearest(name):
    with pytest.raises(ConfigError, match="Did you mean 'compact'"):
        WORKFLOWS.get(name)(style="compct")


def test_a_task_without_compact_text_is_refused():
    bare = Problem(id="t/1", question="Q", short="", answer_format="A", reference=None)
    with pytest.raises(ConfigError, match=r"workflow.style=natural"):
        next(WORKFLOWS.get("voting")(style="compact").play(bare))
