"""Which runs are seeds of one cell, and what a cell is called."""

import pytest

from gradscope.errors import DataError
from gradscope.figures.cells import group_cells, policy_layout


def quick(build, *arguments, **options):
    return build(*arguments, num_steps=2, evaluate_every=0, **options)[0]


def test_seeds_are_one_cell_and_policies_stand_side_by_side(six):
    cells = group_cells(six[::-1])
    assert [cell.name for cell in cells] == ["Voting-IP-0.6B-Stack-Code", "Voting-SP-0.6B-Stack-Code"]
    assert [cell.layout for cell in cells] == ["IP", "SP"]
    assert {cell.setting for cell in cells} == {"Voting-0.6B-Stack-Code"}
    assert cells[0].seeds == ("2", "1", "0")
    assert cells[0].size == "3 seeds"
    assert cells[0].roles == ("generator", "aggregator")


def test_runs_that_differ_in_more_than_the_seed_are_different_cells_and_say_in_what(build):
    low, high = quick(build, "SP", 0), quick(build, "SP", 1, optim__learning_rate=0.02)
    isolated = quick(build, "IP", 2, optim__learning_rate=0.02)
    cells = group_cells([low, high, isolated])
    assert [cell.name for cell in cells] == [
        "Voting-SP-0.6B-Stack-Code (optim.learning_rate=0.003)",
        "Voting-IP-0.6B-Stack-Code (optim.learning_rate=0.02)",
        "Voting-SP-0.6B-Stack-Code (optim.learning_rate=0.02)",
    ]
    # The two of equal learning rate are one setting, so they are compared in one row.
    assert cells[1].setting == cells[2].setting != cells[0].setting
    assert [cell.size for cell in cells] == ["one seed"] * 3


def test_how_a_run_ran_makes_no_new_cell(build):
    runs = [quick(build, "SP", seed, train__threads=seed, train__checkpoint_every=seed) for seed in (0, 1)]
    assert len(group_cells(runs)) == 1


def test_the_same_seed_twice_is_not_two_seeds(build):
    cells = group_cells([quick(build, "SP", 5), quick(build, "SP", 5)])
    assert [cell.size for cell in cells] == ["2 runs of 1 seed"]


def test_one_run_twice_is_refused(six):
    with pytest.raises(DataError, match="is given twice; a copy is no second seed"):
        group_cells([six[0], six[1], six[0]])


def test_runs_without_configuration_are_cells_of_their_own(build):
    runs = [quick(build, "SP", seed, config={}) for seed in (0, 1)]
    cells = group_cells(runs)
    assert [len(cell.runs) for cell in cells] == [1, 1]
    assert [cell.name for cell in cells] == ["run-0-SP", "run-1-SP"]


def test_a_foreign_configuration_is_a_name_only_where_it_is_short(build):
    short = quick(build, "SP", 0, config={"lr": 0.1, "rank": 4})
    flat = {f"argument_{number}": number for number in range(80)}
    long = quick(build, "SP", 1, config=flat)
    assert [cell.name for cell in group_cells([short, long])] == ["lr=0.1, rank=4-SP", "run-1-SP"]


def test_a_trainer_stands_where_a_workflow_does(build):
    config = {"trainer": {"name": "GRPOTrainer"}, "model": {"path": "Qwen/Qwen3-0.6B"}}
    assert group_cells([quick(build, "SP", 0, config=config)])[0].name == "GRPOTrainer-SP-0.6B"


def test_runs_of_one_name_without_configuration_are_told_apart(build):
    runs = [quick(build, "SP", 0, config={}) for _ in range(2)]
    ids = [run.attrs["run_id"][:8] for run in runs]
    assert [cell.name for cell in group_cells(runs)] == [f"run-0-SP (run={own})" for own in ids]


def test_a_foreign_configuration_is_the_name(build):
    runs = [quick(build, "SP", seed, config={"recipe": "mine", "seed": seed}) for seed in (0, 1)]
    assert [(cell.name, cell.size) for cell in group_cells(runs)] == [("recipe=mine-SP", "2 seeds")]


SIX = {f"{role}/{turn}": role for turn in (0, 1) for role in ("generator", "evaluator")}


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ({"generator": "a", "evaluator": "a"}, "SP"),
        ({"generator": "a", "evaluator": "b"}, "IP"),
        ({slot: slot for slot in SIX}, "generator/0 | evaluator/0 | generator/1 | evaluator/1"),
        (
            {"generator/0": "a", "evaluator/0": "a", "generator/1": "b", "evaluator/1": "a"},
            "generator/0+evaluator/0+evaluator/1 | generator/1",
        ),
    ],
)
def test_layout_of_any_routing(build, policies, expected):
    assert policy_layout(quick(build, policies, slots=SIX)) == expected


def test_roles_that_share_are_named_together(build):
    slots = {"planner/0": "planner", "worker/0": "worker", "worker/1": "worker", "writer/0": "writer"}
    run = quick(build, {"planner": "a", "worker": "b", "writer": "a"}, slots=slots)
    assert policy_layout(run) == "planner+writer | worker"
