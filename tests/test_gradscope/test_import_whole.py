"""An import replaces nothing, and leaves a whole run or none."""

import json

import pytest

import gradscope
from gradscope.errors import RunFileError, SchemaError
from gradscope.importers.importing import import_run
from gradscope.runfile import RunWriter


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FLAT = [{"step": step, "loss": 0.5, "grad_norm": 1.0} for step in range(1, 5)]


@pytest.mark.parametrize(
    ("source", "out"), [("d/x.metrics.jsonl", "d/x.h5"), ("d/metrics.jsonl", "d"), ("d/run.h5", "d")]
)
def test_neither_the_source_nor_another_file_is_replaced(tmp_path, source, out):
    there = lines(tmp_path / source, *FLAT)
    before = there.read_bytes()
    with pytest.raises(RunFileError, match=r"with -o|already"):
        import_run(there, tmp_path / out, format="jsonl")
    other = lines(tmp_path / "log.jsonl", *FLAT)
    with pytest.raises(RunFileError, match="another path with -o"):
        import_run(other, tmp_path / out)
    assert there.read_bytes() == before
    assert sorted(path.name for path in there.parent.iterdir()) == [there.name]


def test_a_failed_import_leaves_nothing_and_blocks_nothing(tmp_path):
    bad = lines(tmp_path / "bad.jsonl", *({"step": s, "decay/grad_norm": 1.0} for s in (1, 2)))
    for out in ("out/run.h5", "folder"):
        with pytest.raises(SchemaError, match="cannot be called 'decay'"):
            import_run(bad, tmp_path / out)
        assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
    good = lines(tmp_path / "good.jsonl", *FLAT)
    import_run(good, tmp_path / "folder")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["metrics.jsonl", "run.h5"]
    assert gradscope.open_run(tmp_path / "folder")["train"].sizes["step"] == 4


@pytest.mark.parametrize("role", ["decay", "carried"])
def test_names_of_the_files_own_contributors_are_no_roles(tmp_path, role):
    with pytest.raises(SchemaError, match=f"cannot be called '{role}'"):
        RunWriter(tmp_path / "run", slots={"a": "a", role: role}, policies={"a": "p", role: "p"})
    source = lines(
        tmp_path / "log.jsonl", *({"step": s, f"{role}/grad_norm": 1.0, "a/grad_norm": 2.0} for s in (1, 2))
    )
    with pytest.raises(SchemaError, match=f"cannot be called '{role}'"):
        import_run(source, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def test_a_run_needs_no_import(tmp_path):
    with RunWriter(tmp_path / "run", slots={"a": "a"}, policies={"a": "p"}) as writer:
        writer.append(1, metrics={"loss": 1.0})
    for source in (tmp_path / "run", tmp_path / "run" / "run.h5"):
        with pytest.raises(gradscope.GradscopeError, match=r"is a run already.*gradscope diagnose"):
            import_run(source, tmp_path / "out.h5")
