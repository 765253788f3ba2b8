"""What training lays out is what the product would build, and rows hold prompts that know nothing of each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from looseleaf import Document, Image, Looseleaf
from looseleaf.training.batches import (
    IGNORED,
    KINDS,
    SEGMENTS,
    Diet,
    collate,
    load_batches,
    make_row,
)
from looseleaf.training.card import write_card
from looseleaf.training.corpus import corpus
from looseleaf.training.course import BATCHES, FOCUS, LONGEST, PATIENCE, Course, levels, pick_size
from looseleaf.training.drills import DRILLS
from looseleaf.training.evaluate import evaluate
from looseleaf.training.families import Trainee
from looseleaf.training.loop import DIETS, Pass, train, writer_of
from looseleaf.training.optimiser import Optimiser, orthogonal
from looseleaf.training.prompts import Draft, Sight, Writer
from looseleaf.training.recipes import RECIPES, build_folder
from looseleaf.workloads.albums import headline_question, task_album
from looseleaf.workloads.bounds import HELD_OUT, TRAINED
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.lookups import look_up
from looseleaf.workloads.pictures import Picture, draw
from looseleaf.workloads.questions import held_out, trained

CLOSE = 1e-5
GAPS = ("Look at these. ", " and ", " then ")
TASKS = (("legend", False), ("legend", True), ("documents as text", False), ("clip", False))


@pytest.fixture(scope="module", params=RECIPES)
def trainee(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainee]:
    folder = tmp_path_factory.mktemp("trainee") / request.param
    yield Trainee.load(build_folder(request.param, folder, corpus=corpus(), seed=1))
    shutil.rmtree(folder)


def forward(trainee: Trainee, writer: Writer, drafts: list[Draft], length: int) -> torch.Tensor:
    with torch.no_grad():
        return Pass(trainee, "cpu")(collate("test", drafts, length, writer.form.axes))[0]


def test_a_draft_gives_the_logits_of_the_products_own_prompt(trainee: Trainee) -> None:
    name, writer, split = trainee.folder.name, writer_of(trainee), held_out()
    bounds = HELD_OUT[name]
    with Looseleaf.open(trainee.folder, dtype="float32") as ll:
        for task, blind in TASKS:
            chance = split.chance(7)
            size = (bounds.frame_side,) * 2 if task == "clip" else bounds.sizes[-1]
            album = task_album(task, chance, split, size, 2 if "text" in task else 3)
            question = headline_question(task, 2, album, chance, split)
            assert question is not None
            draft, seen = writer.lay_out(album.entries, Sight(blind=blind), GAPS)
            writer.ask(draft, seen, *writer.branch([(f"{draft.tail}\n{question.text}", question.answer, 0)]))
            parts: list[str | Image | Document] = []
            for gap, entry in zip(GAPS, album.entries, strict=False):
                if isinstance(entry, Picture):
                    parts += [gap, Image(draw(entry))]
                else:
                    parts += [gap.rstrip(" "), Document("\n" + entry)]
            given = ll.reference.stock([*parts, f"\n{question.text}"])
            expected = ll.reference.blind(given) if blind else ll.reference.logits(given)[-1]
            ours = forward(trainee, writer, [draft], len(draft.ids))[0]
            assert (ours - expected).abs().max() / expected.abs().max() < CLOSE, (task, blind)
            if not blind:
                assert tuple(draft.ids[: len(given.prompt.ids)]) == given.prompt.ids


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Trainee:
    return Trainee.load(build_folder("qwen2_5_vl", tmp_path_factory.mktemp("default"), corpus=corpus(), seed=2))


@pytest.mark.parametrize("kind", ["pictures", "clips", "streams", "lookups"])
def test_a_prompt_in_a_row_answers_as_it_does_alone(default: Trainee, kind: str) -> None:
    writer, diet = writer_of(default), replace(DIETS["qwen2_5_vl"], length=700)
    one, other = (make_row(kind, writer, diet, levels()[-1], (168, 224), trained().chance(kind, n)) for n in (1, 2))
    alone = forward(default, writer, [other], diet.length)
    both = Draft(axes=3)
    both.extend(one)
    both.extend(other)
    together = forward(default, writer, [both], 2 * diet.length)[-len(alone) :]
    assert (together - alone).abs().max() / alone.abs().max() < CLOSE


def test_rows_fit_and_every_target_has_a_kind(default: Trainee) -> None:
    writer, diet = writer_of(default), DIETS["qwen2_5_vl"]
    for level in levels():
        for kind in BATCHES:
            chance = level.split.chance(kind)
            row = make_row(kind, writer, diet, level, pick_size(kind, level, diet.bounds, chance), chance)
            assert 0 < len(row.ids) <= diet.length
            assert len(row.sees) <= SEGMENTS
            asked = [(target, kind) for target, kind in zip(row.targets, row.kinds, strict=True) if target != IGNORED]
            assert len(asked) > len(row.ids) // 40
            assert all(0 <= one < len(KINDS) for _, one in asked)
            assert len(row.pictures) * 8 <= row.ids.count(writer.form.pad_id)


def test_drills_ask_for_one_skill(default: Trainee) -> None:
    writer, diet, level = writer_of(default), DIETS["qwen2_5_vl"], levels()[-2]
    for skill, drill in DRILLS.items():
        chance = level.split.chance(skill)
        row = make_row(skill, writer, diet, level, pick_size(skill, level, diet.bounds, chance), chance)
        asked = {KINDS[one] for one in row.kinds if one >= 0} - {"other"}
        assert drill.asks[0] in asked
        if skill != "words":
            assert asked <= {*drill.asks, "colour", "form_cells", "happened"}  # asked instead where nothing is unique
        assert sum(target != IGNORED for target in row.targets) > 15


def test_found_pages_answer_each_conversation_alone(default: Trainee) -> None:
    """Several conversations that end at the same pages give what each gives when it is the only one."""
    writer, diet, level = writer_of(default), DIETS["qwen2_5_vl"], levels()[0]
    row = make_row("found", writer, replace(diet, length=800), level, (112, 168), trained().chance(3))
    assert len(row.pictures) == 2
    together = forward(default, writer, [row], 800)
    done = 0
    for answer in sorted({segment for segment, kind in zip(row.segments, row.kinds, strict=True) if kind >= 0}):
        keep = [at for at, segment in enumerate(row.segments) if segment in row.sees[answer]]
        alone = Draft(axes=3, pictures=row.pictures, sees=row.sees)
        alone.grids = [(keep.index(first), rows, columns) for first, rows, columns in row.grids]
        for name in ("ids", "segments", "targets", "kinds", "steps"):
            setattr(alone, name, [getattr(row, name)[at] for at in keep])
        logits = forward(default, writer, [alone], 800)
        assert (together[done : done + len(logits)] - logits).abs().max() / logits.abs().max() < CLOSE
        done += len(logits)
    assert done == len(together)


def test_training_begins_with_words_and_ends_with_everything() -> None:
    course = Course({"pictures": 0.7, "clips": 0.3})
    assert not {"chains", "search", "found"} & set(course.skills)
    assert course.shares == {"words": 1.0}
    assert not course.heed(50, {"words": 0.3})
    step = 0
    for number, level in enumerate(course.levels[:-1]):
        assert course.number == number
        assert course.drilled is None or level.drills
        step += int(level.steps)
        if level.needs:
            assert not course.heed(step, {level.needs: 0.5}), "what the next level rests on is not there"
        assert course.heed(step, {level.needs: 0.9} if level.needs else {})
    assert course.shares["pictures"] == pytest.approx(0.92 * 0.7 * (1 - FOCUS))
    assert sum(course.shares.values()) == pytest.approx(1)
    assert "streams" not in course.shares


def test_a_level_does_not_wait_for_ever() -> None:
    course = Course({"pictures": 1.0})
    words, reading = course.levels[:2]
    start = int(words.steps)
    assert course.heed(start, {})
    assert not course.heed(start + int(LONGEST * reading.steps) - 1, {"line": 0.1})
    assert course.heed(start + int(LONGEST * reading.steps), {"line": 0.1})
    assert course.number == 2


def test_what_is_lacking_is_drilled_in_turn() -> None:
    course = Course({"pictures": 1.0})
    step = 0
    for level in course.levels[:-1]:
        step += int(level.steps)
        assert course.heed(step, dict.fromkeys(course.skills, 1.0))
    assert course.heed(step, {"legend": 0.6, "codes": 0.3, "pages": 0.9})
    assert course.drilled == "legend"
    assert course.shares["legend"] == FOCUS
    assert course.level_of("legend") is course.levels[-2]  # hardly there
    assert course.level_of("pictures") is course.levels[-1]
    assert not course.heed(step + 50, {"legend": 0.9})
    assert course.level_of("legend") is course.levels[-1]
    assert course.heed(step + 100, {"legend": 0.99})
    assert course.drilled == "codes"
    assert not course.heed(step + 50 + PATIENCE, {})
    assert course.heed(step + 100 + PATIENCE, {})  # it has had its time
    assert course.drilled == "pages"
    assert course.heed(step + 150 + PATIENCE, {"pages": 0.98})
    assert course.drilled == "codes"  # round again
    assert course.heed(step + 200 + PATIENCE, {"codes": 0.98})
    assert course.drilled is None


def test_words_from_memory_are_the_tokenizers_own(trainee: Trainee) -> None:
    writer = writer_of(trainee)
    for line in corpus()[:1500]:
        if "  " not in line and "\n" not in line:
            assert writer.words.ids(line) == writer.words.whole(line), line
    pages = Documents(trained().chance(1), trained(), (224, 224))
    for page in pages.texts():
        assert writer.words.ids("\n" + page) == writer.words.whole("\n" + page)


def test_what_is_evicted_or_blind_is_not_seen(default: Trainee) -> None:
    writer, split = writer_of(default), trained()
    chance = split.chance(3)
    album = task_album("legend", chance, split, (168, 224), 3)
    question = headline_question("legend", 2, album, chance, split)
    assert question is not None

    def asked(sight: Sight) -> torch.Tensor:
        draft, seen = writer.lay_out(album.entries, sight, ["", "", ""])
        writer.ask(draft, seen, *writer.branch([(question.text, question.answer, 0)]))
        return forward(default, writer, [draft], 400)[0]

    plain = asked(Sight())
    for sight in (Sight(blind=True), Sight(evicted=frozenset({0})), Sight(window=1)):
        assert not torch.allclose(asked(sight), plain, atol=1e-6)


def test_batches_are_the_same_for_the_same_seed(default: Trainee) -> None:
    diet = replace(DIETS["qwen2_5_vl"], batch=2)
    first, again, other = (
        next(load_batches(writer_of(default), diet, Course(diet.mixed), seed=seed, workers=0)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.shapes, again.shapes)
    assert not torch.equal(first.ids, other.ids)


def test_orthogonal_matrices_come_out_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((3, 64, 48), (2, 48, 96)):
        sizes = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
        assert sizes.min() > 0.9
        assert sizes.max() < 1.1


def test_words_alone_step_everything_they_go_through(trainee: Trainee) -> None:
    """The tower has no slopes then; a matrix of the text that has the shape of one of the tower's must not wait."""
    writer, split = writer_of(trainee), trained()
    before = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    draft, seen = writer.lay_out([], Sight(), [])
    question, call = look_up(Documents(split.chance(0), split, (224, 224)), split.chance(0), split)
    writer.ask(draft, seen, *writer.branch([(question.text, call, 0)]))
    logits, targets = Pass(trainee, "cpu")(collate("copy", [draft], 170, writer.form.axes))
    torch.nn.functional.cross_entropy(logits, targets).backward()
    sloped = [name for name, one in trainee.model.named_parameters() if one.grad is not None and one.grad.any()]
    assert len([name for name in sloped if "language_model.layers" in name]) > 60
    Optimiser(trainee.model.named_parameters()).step(1e-3)
    after = dict(trainee.model.named_parameters())
    still = [name for name in sloped if torch.equal(before[name], after[name])]
    trainee.model.load_state_dict(before)
    assert not still


def test_a_small_model_learns_to_look_up_by_name(default: Trainee, tmp_path: Path) -> None:
    """Copying the right name into a search call: what no model can do whose gradients or masks are wrong."""
    torch.manual_seed(0)
    writer, split = writer_of(default), trained()
    chance, run = split.chance("copy"), Pass(default, "cpu")
    optimiser = Optimiser([one for one in default.model.named_parameters() if "visual" not in one[0]])
    right: list[float] = []
    for _ in range(60):
        drafts = []
        for _ in range(4):
            draft, seen = writer.lay_out([], Sight(), [])
            for _ in range(3):
                question, call = look_up(Documents(chance, split, (224, 224)), chance, split)
                writer.ask(draft, seen, *writer.branch([(question.text, call, 0)]))
            drafts.append(draft)
        logits, targets = run(collate("copy", drafts, 170, 3))
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimiser.step(1e-3)
        right.append(float((logits.argmax(-1) == targets).float().mean()))
    assert sum(right[-5:]) / 5 > 0.985


def test_training_writes_a_folder_that_opens_and_a_log(tmp_path: Path) -> None:
    diet = Diet(bounds=DIETS["qwen2_5_vl"].bounds, length=700, batch=1, pictures=0.5, clips=0.5)
    said: list[str] = []
    _, writer, run = train(
        "qwen2_5_vl", tmp_path / "model", seed=3, minutes=1, device="cpu", workers=0, compiled=False, diet=diet,
        steps=2, tell=said.append,
    )  # fmt: skip
    assert "14." in said[0]
    assert {"training.json", "training.png", "model.safetensors"} <= {
        one.name for one in (tmp_path / "model").iterdir()
    }
    with Looseleaf.open(tmp_path / "model") as ll:
        assert ll.ask(["Hello"], max_tokens=2).usage.fresh_tokens
    rows = evaluate("qwen2_5_vl", run, writer, replace(diet, batch=1, length=760), count=1, tell=said.append)
    assert {row["task"] for row in rows} >= {"legend", "change", "documents", "documents as text", "clip"}
    assert all(0 <= row["right"] <= 1 and row["n"] >= 1 for row in rows)
    (tmp_path / "model" / "accuracy.json").write_text(json.dumps(rows))
    card = write_card(tmp_path / "model").read_text()
    assert "2 steps" in card
    assert "| documents as text | 2 |" in card


def test_a_model_of_one_size_sees_smaller_pictures_until_prompts_are_whole() -> None:
    bounds, every = TRAINED["deepseek_vl"], Course({"pictures": 1.0}).levels
    for level in every:
        frames = {pick_size(kind, level, bounds, Random(0)) for kind in ("clips", "events")}
        assert frames == ({(224, 224)} if level is every[-1] else {(112, 112)})
        pictures = {pick_size("pictures", level, bounds, Random(seed)) for seed in range(99)}
        assert (pictures == {(224, 224)}) == (level is every[-1])
        assert ((224, 224) in pictures) == (level is every[-1])
    assert HELD_OUT["deepseek_vl"].sizes == ((224, 224),), "what its processor makes of every image"
