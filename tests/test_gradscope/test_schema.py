"""The schema fits itself: dims exist, names do not hide one another, everything is described."""

import math

from gradscope import schema

FIXED_DIMS = {*schema.LABEL_DIMS, *schema.MIRROR_DIMS, *schema.NUMBERED_DIMS}


def test_every_variable_is_described_and_has_known_dims():
    for table in schema.TABLES.values():
        for variable in table.variables:
            assert variable.dims[0] == table.dim, variable
            assert set(variable.dims[1:]) <= FIXED_DIMS, variable
            assert len(set(variable.dims)) == len(variable.dims), variable
            assert variable.long_name, variable
            assert variable.units or variable.dtype == "str", variable


def test_no_variable_has_the_name_of_an_inherited_coordinate():
    # xarray would give the coordinate where the variable is asked for.
    for table in schema.TABLES.values():
        for variable in table.variables:
            assert variable.name not in FIXED_DIMS, f"{table.name}.{variable.name}"


def test_no_name_stands_twice_in_a_group():
    for group in {table.group for table in schema.TABLES.values()}:
        tables = [table for table in schema.TABLES.values() if table.group == group]
        names = [variable.name for table in tables for variable in table.variables]
        assert len(names) == len(set(names)), group


def test_the_growing_axis_of_each_table_is_a_required_column():
    for table in schema.TABLES.values():
        variable = table.variable(table.dim)
        assert variable is not None
        assert variable.required
        assert variable.dtype == "i8"


def test_fill_values():
    assert math.isnan(schema.fill_value("f8"))
    assert schema.fill_value("i8") == -1
    assert schema.fill_value("str") == ""


def test_what_the_design_names_is_there():
    updates = {variable.name: variable for variable in schema.TABLES["updates"].variables}
    assert updates["gram"].dims == ("update", "slot", "slot_b")
    assert updates["gram"].dtype == "f8"
    assert updates["update_gram"].dims == ("update", "contributor", "contributor_b")
    assert updates["effect"].dims == ("update", "role", "contributor")
    evaluation = {variable.name for variable in schema.TABLES["eval"].variables}
    assert {"step", "segment", "dataset", "num_correct", "num_total", "temperature", "greedy"} <= evaluation
