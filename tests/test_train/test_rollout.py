"""Streams, the engine's samples and log-probabilities, and the driver of episodes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradscope.errors import ConfigError
from gradscope.train.assets.tokenizer import build_tokenizer
from gradscope.train.batch import Sample, collate, completion_logprobs
from gradscope.train.episode import Call, Mark, Message, Outcome, Problem
from gradscope.train.rollout import Completion, Request, Stream, play_episodes
from gradscope.train.rollout.chat import Chat
from gradscope.train.rollout.hf import sample
from gradscope.train.session import Session


@pytest.fixture(scope="module")
def session():
    from gradscope.train import load_config

    config = load_config("voting-isolated-stack_code", ["probes.enabled=false"])
    session = Session(config)
    with torch.no_grad():  # adapters that matter
        generator = torch.Generator().manual_seed(1)
        for name in session.policies.names:
            for parameter in session.policies.parameters(name).values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return session


def requests_of(session, num=24):
    stream = Stream(3, "train", 5)
    prompts = [
        session.chat.encode((Message("system", "generator"), Message("user", text)))
        for text in ("a+b", "a-3*b", "7*a+b-2+a", "b")
    ]
    return [
        Request(
            prompts[i % 4],
            session.policies.names[i % 2],
            stream.uniforms(session.engine.max_new_tokens, problem=i % 4, sample=i, slot=0, turn=0),
        )
        for i in range(num)
    ]


def test_streams_depend_on_their_place_only():
    stream = Stream(0, "train", 1)
    place = {"problem": 2, "sample": 3, "slot": 1, "turn": 0}
    numbers = stream.uniforms(64, **place)
    assert np.array_equal(numbers, Stream(0, "train", 1).uniforms(64, **place))
    assert np.array_equal(numbers[:10], stream.uniforms(10, **place))
    assert ((numbers >= 0) & (numbers < 1)).all()
    others = [
        Stream(1, "train", 1).uniforms(64, **place),
        Stream(0, "evaluate", 1).uniforms(64, **place),
        Stream(0, "train", 2).uniforms(64, **place),
        *(stream.uniforms(64, **{**place, key: place[key] + 1}) for key in place),
    ]
    for other in others:
        assert not np.isin(other, numbers).any()


def test_samples_do_not_depend_on_batching(session):
    requests = requests_of(session)
    whole = session.engine.generate(requests)
    alone = [session.engine.generate([request])[0] for request in requests[:6]]
    session.engine.max_batch_rows = 5
    in_fives = session.engine.generate(requests[::-1])[::-1]
    session.engine.max_batch_rows = 512
    for other in (in_fives, alone):
        for mine, theirs in zip(whole, other, strict=False):
            assert mine.ids == theirs.ids
            assert mine.logprobs == pytest.approx(
                theirs.logprobs, abs=2e-5
            )  # float32, different batch shapes
    assert len({completion.ids for completion in whole}) > 6


def test_engine_and_trainer_agree_on_log_probabilities(session):
    requests = requests_of(session)
    for policy in session.policies.names:
        mine = [request for request in requests if request.policy == policy]
        samples = []
        for request, completion in zip(mine, session.engine.generate(mine), strict=True):
            row = make_row(prompt_ids=request.prompt_ids, completion=completion)
            samples.append(Sample(row, 0, (), 0.0, 1.0))
        batch = collate(samples, [1.0] * len(samples), torch.device("cpu"))
        session.policies.activate(policy)
        with torch.no_grad():
            logprobs = completion_logprobs(session.policies.network, batch, temperature=0.7)
        gap = ((logprobs - batch.sampled_logprobs) * batch.completion_mask).abs().max()
        assert gap < 2e-5  # float32, different batch shapes


def test_greedy_takes_the_most_probable_token(session):
    (request,) = requests_of(session, 1)
    (completion,) = session.engine.generate([request], greedy=True)
    session.policies.activate(request.policy)
    ids = list(request.prompt_ids)
    for token in completion.ids:
        with torch.no_grad():
            logits = session.policies.network(input_ids=torch.tensor([ids])).logits[0, -1]
        assert token == int(logits.argmax())
        ids.append(token)
    assert completion.truncated is (completion.ids[-1] not in session.chat.end_ids)


def test_a_reply_ends_at_any_end_token_or_is_cut(session):
    requests = requests_of(session)
    for completion in session.engine.generate(requests):
        ends = [i for i, token in enumerate(completion.ids) if token in session.chat.end_ids]
        assert ends == ([] if completion.truncated else [len(completion.ids) - 1])
        assert len(completion.logprobs) == len(completion.entropy) == len(completion.ids)
    before = session.engine.end_ids
    plus = session.chat.tokenizer.convert_tokens_to_ids("+")
    session.engine.end_ids = torch.tensor([session.chat.end_ids[0], plus])
    ended = session.engine.generate(requests)
    session.engine.end_ids = before
    assert any(completion.ids[-1] == plus for completion in ended)
    assert all(plus not in completion.ids[:-1] for completion in ended)


def test_inverse_cdf_has_the_right_frequencies_and_entropy():
    logits = torch.tensor([[1.0, -math.inf, 0.0, 2.0, -math.inf]])
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, logprobs, entropy = sample(logits.expand(20_000, -1), uniforms, temperature=0.5, greedy=False)
    probabilities = torch.softmax(logits[0] / 0.5, -1)
    assert torch.bincount(tokens, minlength=5) / 20_000 == pytest.approx(probabilities, abs=1e-4)
    assert logprobs.exp() == pytest.approx(probabilities[tokens], abs=1e-6)
    present = probabilities[probabilities > 0]
    assert entropy[0].item() == pytest.approx(-(present * present.log()).sum().item(), abs=1e-6)
    edges = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sample(logits.expand(2, -1), edges, temperature=1.0, greedy=False)[0].tolist() == [0, 3]


class EchoTask:
    """Right is a reply that contains the problem's reference."""

    def grade(self, problem, text):
        return str(problem.reference) in text

    def in_format(self, text):
        return bool(text)


class PairWorkflow:
    """Two workers side by side, then a judge who sees both."""

    roles = ("worker", "judge")
    slots = {"worker/0": "worker", "worker/1": "worker", "judge/0": "judge"}  # noqa: RUF012

    def play(self, problem):
        prompt = (Message("system", "worker"), Message("user", problem.short))
        replies = yield [Call("worker", f"worker/{k}", prompt) for k in (0, 1)]
        question = (Message("system", "evaluator"), Message("user", "|".join(replies)))
        (verdict,) = yield [Call("judge", "judge/0", question)]
        judged = Mark(solution=replies[0], judges=True, claims_correct=verdict == "y", in_format=True)
        return Outcome(replies[-1], (Mark(solution=replies[0]), Mark(), judged))


class ScriptedEngine:
    """Answers a prompt of length n with the digit n mod 10, a judge with y; remembers what it was asked."""

    max_new_tokens = 4

    def __init__(self, chat):
        self.chat = chat
        self.rounds = []

    def generate(self, requests, *, greedy=False):
        self.rounds.append(list(requests))
        texts = ["y" if r.policy == "judge" else str(len(r.prompt_ids) % 10) for r in requests]
        ids = [(self.chat.tokenizer.convert_tokens_to_ids(text), 1) for text in texts]
        ones = np.ones(2, dtype=np.float32)
        return [Completion(i, -ones, ones, truncated=False) for i in ids]


def play(problems, *, max_prompt_tokens=20, group_size=2, workflow=None):
    chat = Chat(build_tokenizer(), [1])
    engine = ScriptedEngine(chat)
    episodes = play_episodes(
        workflow or PairWorkflow(),
        EchoTask(),
        problems,
        group_size=group_size,
        engine=engine,
        chat=chat,
        routing={"worker/0": "worker", "worker/1": "worker", "judge/0": "judge"},
        stream=Stream(0, "train", 7),
        max_prompt_tokens=max_prompt_tokens,
    )
    return episodes, engine


def problem(short, reference):
    return Problem(short, short, short, "", reference)


def test_all_pending_calls_of_a_level_are_asked_at_once():
    episodes, engine = play([problem("ab", "4"), problem("abab", "9")])
    assert [len(asked) for asked in engine.rounds] == [8, 4]
    assert [(e.problem_index, e.sample) for e in episodes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row.id for row in episodes[1].rows] == ["7-0-1-worker/0-0", "7-0-1-worker/1-0", "7-0-1-judge/0-0"]
    numbers = {request.uniforms.tobytes() for asked in engine.rounds for request in asked}
    assert len(numbers) == 12


def test_grades_of_episodes_and_of_single_replies():
    episodes, _ = play([problem("ab", "4"), problem("abab", "9")], group_size=1)
    right, wrong = episodes
    assert (right.answer, right.correct) == ("4", True)
    assert (wrong.answer, wrong.correct) == ("6", False)
    # A worker's own answer, nothing to grade, and a judge that is right only about the right one.
    assert [row.own for row in right.rows] == pytest.approx([1, math.nan, 1], nan_ok=True)
    assert [row.own for row in wrong.rows] == pytest.approx([0, math.nan, 0], nan_ok=True)
    assert all(row.in_format for row in right.rows)
    assert right.rows[0].completion_ids[-1] == 1


def test_an_overlong_prompt_drops_its_episode_only():
    episodes, engine = play([problem("ab", "4"), problem("a" * 30, "9")])
    assert [episode.dropped is None for episode in episodes] == [True, True, False, False]
    assert episodes[2].dropped == "worker/0 has a prompt of 32 tokens, allowed are 20"
    assert episodes[2].rows == ()
    assert episodes[2].correct is False
    assert [len(asked) for asked in engine.rounds] == [4, 2]
    assert all(episode.dropped for episode in play([problem("a" * 30, "9")])[0])


class OddWorkflow(PairWorkflow):
    """Yields the given lists of slots one after another, then returns the given outcome."""

    def __init__(self, levels, outcome):
        self.levels, self.outcome = levels, outcome

    def play(self, problem):
        for slots in self.levels:
            yield [Call(s.partition("/")[0], s, (Message("system", "worker"),)) for s in slots]
        return self.outcome


NO_CALLS = r"workflow OddWorkflow asked for no reply; .* \(on problem 'ab'\)"


@pytest.mark.parametrize(
    ("levels", "outcome", "message"),
    [
        ([[]], Outcome("4", ()), NO_CALLS),
        (
            [["worker/0"], []],
            Outcome("4", (Mark(),)),
            r"workflow OddWorkflow asked for no reply; .* \(on problem 'ab'\)",
        ),
        ([], Outcome("4", ()), NO_CALLS),
        ([["worker/0"]], Outcome("4", ()), r"OddWorkflow gave 0 marks for 1 replies; .* \(on problem 'ab'\)"),
        ([["worker/0"]], Outcome("4", (Mark(), Mark())), r"OddWorkflow gave 2 marks for 1 replies"),
        ([["worker/0"]], None, r"OddWorkflow ended with None; it must return an Outcome"),
        ([["worker/7"]], Outcome("4", (Mark(),)), r"OddWorkflow called the unknown slot 'worker/7'"),
    ],
)
def test_a_workflow_that_breaks_the_rules_is_named(levels, outcome, message):
    with pytest.raises(ConfigError, match=message) as caught:
        play([problem("ab", "4")], workflow=OddWorkflow(levels, outcome))
    assert "\n" not in str(caught.value)


def make_row(*, prompt_ids=(3, 20), completion):
    row = play([problem("ab", "4")])[0][0].rows[0]
    return replace(
        row,
        prompt_ids=prompt_ids,
        completion_ids=completion.ids,
        logprobs=completion.logprobs,
        entropy=completion.entropy,
    )
