"""Whatever is derived from a run says its unit and what it is, and carries labels on its axes."""

import numpy as np
import pytest
import xarray as xr

from gradscope import derive, synthetic

SERIES = {
    "step_gram": derive.step_gram,
    "step_role_gram": derive.step_role_gram,
    "step_count": derive.step_count,
    "step_role_count": derive.step_role_count,
    "role_norms": derive.role_norms,
    "role_shares": derive.role_shares,
}


@pytest.fixture(scope="module")
def run():
    return synthetic.make_run("amplification", seed=0)[0]


def described(result):
    return list(result.data_vars.values()) if isinstance(result, xr.Dataset) else [result]


def check(result):
    for array in described(result):
        assert array.attrs["units"], array.name
        assert array.attrs["long_name"], array.name
        assert set(array.dims) == set(array.coords), array.name
        assert np.isfinite(array.values).any()


@pytest.mark.parametrize("name", SERIES)
def test_series_of_a_policy(run, name):
    for policy in derive.policies(run):
        check(SERIES[name](run, policy))


def test_measures_of_parallel_copies(run):
    for policy in derive.policies(run):
        slots = derive.policy_slots(run, policy)
        roles = [slot.split("/")[0] for slot in slots]
        for role in {role for role in roles if roles.count(role) > 1}:
            check(derive.copy_measures(run, policy, role))
