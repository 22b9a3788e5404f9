"""One colour a role, and final paper form of every figure."""

import io
import re

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from gradscope.errors import RunFileError
from gradscope.figures import FIGURES
from gradscope.figures.style import LAYOUT_LOOKS, ROLE_LOOKS, role_looks

NAMES = FIGURES.names()


def test_known_roles_have_six_different_colours_and_markers_that_no_policy_has():
    assert len({look.colour for look in ROLE_LOOKS.values()}) == len(ROLE_LOOKS) == 6
    assert len({look.marker for look in ROLE_LOOKS.values()}) == 6
    assert not {look.colour for look in ROLE_LOOKS.values()} & {look.colour for look in LAYOUT_LOOKS.values()}


def test_a_role_keeps_its_look_whatever_stands_beside_it():
    alone = role_looks(["critic"])["critic"]
    together = role_looks(["generator", "critic", "worker"])
    assert together["critic"] == alone
    assert together["generator"] == ROLE_LOOKS["generator"]
    assert alone.colour not in {look.colour for look in ROLE_LOOKS.values()}


def test_unknown_roles_never_share_a_look_while_there_are_enough():
    looks = role_looks([f"role {number}" for number in range(8)])
    assert len(set(looks.values())) == 8


@pytest.mark.parametrize("name", NAMES)
def test_widths_are_those_of_a_paper_and_texts_seven_to_nine_points(name, drawings):
    figure = drawings[name].figure
    assert figure.get_figwidth() in (3.25, 6.75)
    FigureCanvasAgg(figure).draw()
    sizes = {text.get_fontsize() for text in figure.findobj(Text) if text.get_text().strip()}
    assert min(sizes) >= 7
    assert max(sizes) <= 9


@pytest.mark.parametrize("name", NAMES)
def test_files_have_final_size_embedded_fonts_and_the_same_bytes_again(name, drawings, six, tmp_path):
    first = drawings[name].save(tmp_path / "first", name)
    assert [file.name for file in first] == [f"{name}.pdf", f"{name}.png", f"{name}.csv"]
    second = FIGURES.get(name)(six).save(tmp_path / "second", name)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    pdf, png, _ = (file.read_bytes() for file in first)
    width, height = drawings[name].figure.get_size_inches()
    assert Image.open(io.BytesIO(png)).size == (round(300 * width), round(300 * height))
    box = [float(number) for number in re.search(rb"/MediaBox \[([^\]]*)\]", pdf).group(1).split()]
    assert box[2:] == pytest.approx([72 * width, 72 * height])
    assert b"/Type42" not in pdf  # a name of PostScript; in PDF, type 42 is a TrueType descendant font
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_saving_replaces_what_is_there_and_leaves_nothing_else(drawings, tmp_path):
    (tmp_path / "shares.csv").write_text("old")
    drawings["shares"].save(tmp_path, "shares")
    assert (tmp_path / "shares.csv").read_text() == drawings["shares"].csv()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["shares.csv", "shares.pdf", "shares.png"]


def test_a_folder_that_is_a_file_is_refused(drawings, tmp_path):
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(RunFileError, match="the figure cannot be written"):
        drawings["shares"].save(file, "shares")


def test_drawing_leaves_no_trace_in_matplotlib(six, tmp_path):
    with matplotlib.rc_context({"font.size": 23, "axes.titlesize": 31, "pdf.fonttype": 3}):
        before = dict(matplotlib.rcParams)
        drawing = FIGURES.get("amplification")(six[:1])
        pdf, _, _ = drawing.save(tmp_path, "amplification")
        assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == []
    # The user's settings do not reach the figure either.
    assert {text.get_fontsize() for text in drawing.figure.findobj(Text) if text.get_text()} <= {7.0, 8.0}
    assert b"/Type3" not in pdf.read_bytes()


def misplaced(figure):
    """Panels (with their labels and titles) and legends that leave the paper or lie over one another."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = {f"panel {place}": axes.get_tightbbox(renderer) for place, axes in enumerate(figure.axes)}
    legends = {
        f"legend {place}": legend.get_window_extent(renderer) for place, legend in enumerate(figure.legends)
    }
    paper = figure.bbox
    wrong = [
        f"{name} leaves the paper: {box}"
        for name, box in {**boxes, **legends}.items()
        if box is not None and (box.x0 < -1 or box.y0 < -1 or box.x1 > paper.x1 + 1 or box.y1 > paper.y1 + 1)
    ]
    return wrong + [
        f"{legend} covers {name}"
        for legend, cover in legends.items()
        for name, box in boxes.items()
        if box is not None and cover.overlaps(box)
    ]


WORKERS = {
    "orchestrator/0": "orchestrator",
    **{f"worker/{k}": "worker" for k in range(3)},
    "synthesizer/0": "synthesizer",
}
TURNS = {f"{role}/{turn}": role for turn in range(3) for role in ("generator", "evaluator")}


@pytest.fixture(scope="module")
def crowds(build, six):
    plain = {"num_steps": 12}
    return {
        "one": six[3:4],
        "long names": [
            build(
                "SP",
                0,
                optim__learning_rate=0.02,
                policy__rank=64,
                workflow__name="orch_workers",
                slots=WORKERS,
                **plain,
            )[0],
            build(
                "SP",
                1,
                optim__learning_rate=0.003,
                policy__rank=8,
                workflow__name="orch_workers",
                slots=WORKERS,
                **plain,
            )[0],
        ],
        "many slots": [
            build(layout, 0, workflow__name="eval_opt", slots=TURNS, **plain)[0] for layout in ("IP", "SP")
        ],
    }


@pytest.mark.parametrize("name", NAMES)
def test_drawing_again_moves_nothing(name, six):
    figure = FIGURES.get(name)(six[:1] + six[3:4]).figure
    places = []
    for _ in range(3):
        FigureCanvasAgg(figure).draw()
        places.append([axes.get_position().bounds for axes in figure.axes])
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("name", NAMES)
def test_six_runs_have_their_place_on_the_paper(name, drawings):
    assert misplaced(drawings[name].figure) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("crowd", ["one", "long names", "many slots"])
def test_no_text_leaves_the_paper_and_no_panel_lies_under_the_legend(name, crowd, crowds):
    assert misplaced(FIGURES.get(name)(crowds[crowd]).figure) == []
