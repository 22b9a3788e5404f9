"""Which problems a step plays: each once an epoch, in an order that the seed decides."""

from gradscope.train.problem_order import training_indices


def test_which_problems_a_step_plays():
    seen = [training_indices(0, step, 3, total=7) for step in range(1, 8)]
    flat = [index for step in seen for index in step]
    assert sorted(flat[:7]) == sorted(flat[7:14]) == sorted(flat[14:]) == list(range(7))
    assert flat[:7] != flat[7:14]
    assert training_indices(0, 4, 3, total=7) == seen[3]
    endless = training_indices(0, 1, 6, total=None)
    assert endless == training_indices(0, 1, 6, total=None)
    assert not set(endless) & set(training_indices(1, 1, 6, total=None))
