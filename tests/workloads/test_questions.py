import itertools
import json
import re

import pytest

from looseleaf.workloads.albums import HEADLINE, headline_question, mixed_album, task_album
from looseleaf.workloads.bounds import HELD_OUT, TRAINED
from looseleaf.workloads.clips import Clip
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.lookups import look_up
from looseleaf.workloads.questions import Phrases, held_out, held_out_fonts, trained
from looseleaf.workloads.scenes import Scenes
from looseleaf.workloads.streams import Stream

TASKS = list(HEADLINE)


def size_of(task: str) -> tuple[int, int]:
    return (112, 112) if task in ("clip", "stream") else (224, 224)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_asks_the_same_and_another_something_else(task: str):
    def ask(seed: int) -> tuple[str, str]:
        split = held_out()
        chance = split.chance(task, seed)
        album = task_album(task, chance, split, size_of(task), 5)
        found = [headline_question(task, hops, album, chance, split) for hops in (1, 2)]
        return tuple(f"{one.text} {one.answer}" for one in found if one)

    assert ask(3) == ask(3)
    assert len({ask(seed) for seed in range(20)}) > 15


def test_splits_never_share_a_seed():
    drawn = {split.chance("legend", 1).random() for split in (trained(), held_out(), held_out_fonts())}
    assert len(drawn) == 3


def test_layouts_wordings_and_counts_are_held_out():
    assert not set(trained().grids) & set(held_out().grids)
    for family, usual in TRAINED.items():
        held = HELD_OUT[family]
        assert not set(usual.counts) & set(held.counts)
        assert not set(usual.clip_frames) & set(held.clip_frames)
        assert not set(usual.stream_frames) & set(held.stream_frames)


def test_held_wordings_are_worded_otherwise():
    import looseleaf.workloads.clips as clips
    import looseleaf.workloads.documents as documents
    import looseleaf.workloads.questions as questions
    import looseleaf.workloads.scenes as scenes
    import looseleaf.workloads.streams as streams

    found = [
        (name, one)
        for module in (clips, documents, questions, scenes, streams)
        for name, one in vars(module).items()
        if isinstance(one, Phrases)
    ]
    assert len(found) >= 20
    for name, one in found:
        assert one.held, name
        assert not set(one.held) & set(one.usual), name
        slots = {tuple(sorted(re.findall(r"{(\w+)}", text))) for text in one.held}
        assert slots <= {tuple(sorted(re.findall(r"{(\w+)}", text))) for text in one.usual}, name
        words = set(re.findall(r"\w+", re.sub(r"{\w+}", "", " ".join(one.held)).lower()))
        every = " ".join(text for _, other in found for text in other.usual)
        assert words <= set(re.findall(r"\w+", every.lower())), (name, words)


def test_needs_carriers_and_hops_fit_together():
    split = trained()
    for seed in range(60):
        chance = split.chance("album", seed)
        album = mixed_album(chance, split, (224, 224), chance.choice((1, 2, 3, 4, 6, 7)))
        for number, kind, _ in album.kinds():
            question = album.ask(number, kind, chance, split)
            assert question.kind == kind or (question.kind == "colour" and kind in ("tag", "colour_of", "where"))
            assert set(question.carriers) <= set(question.needs) <= set(range(len(album.entries)))
            assert question.hops == 2 or question.facts or len(question.needs) <= 2
            if question.hops == 2 and not question.facts:
                assert len(question.needs) == 2
                assert question.carriers == (max(question.needs),)
            assert question.answer
            assert "{" not in question.text


def test_codes_come_from_the_legend():
    split = trained()
    for seed in range(20):
        chance = split.chance(seed)
        world = Scenes(chance, split, (224, 224), count=4, legend=True, pairs=1)
        question = world.ask("form_codes", chance, split)
        scenes = {one.tag: one for one in world.scenes}
        for key, value, (place,) in question.facts:
            *tag, cell = key.split()
            scene = scenes[tag[0]] if tag else next(one for one in world.scenes if one.place == place)
            shape, _ = scene.cells["ABCD".index(cell[0]) * scene.columns + int(cell[1]) - 1]
            assert scene.place == place
            assert value == world.codes[shape]


def test_what_changed_is_what_differs():
    split = trained()
    for seed in range(40):
        chance = split.chance(seed)
        world = Scenes(chance, split, (224, 224), count=2, legend=False, pairs=1)
        (before, after, places) = world.changes[0]
        assert [at for at, (a, b) in enumerate(zip(before.cells, after.cells, strict=True)) if a != b] == places
        if len(places) == 1:
            row, column = divmod(places[0], after.columns)
            assert world.ask("changed_cell", chance, split).answer == f"{'ABCD'[row]}{column + 1}"


def test_documents_need_both_pages():
    split = trained()
    for seed in range(20):
        chance = split.chance(seed)
        pages = Documents(chance, split, (224, 224))
        question = pages.ask("value_of", chance, split)
        name = next(name for name in pages.id_of if re.search(rf"\b{name}\b", question.text))
        assert question.answer == pages.value_of[pages.id_of[name]]
        first, second = pages.texts()
        assert f"{name} {pages.id_of[name]}" in first
        assert f"{pages.id_of[name]} {question.answer}" in second
        assert pages.ask("no_name", chance, split).answer == "not shown"


def test_every_frame_but_the_first_has_one_event():
    split = trained()
    for seed in range(40):
        clip = Clip(split.chance(seed), split, 112, frames=7)
        assert len(clip.events) == 6
        for (before, after), event in zip(itertools.pairwise(clip.states), clip.events, strict=True):
            changed = {shape for shape in {*before, *after} if before.get(shape) != after.get(shape)}
            assert changed == {event.split()[0]}
            cells = [cell for _, cell in after.values()]
            assert len(cells) == len(set(cells))


def test_a_stream_of_hours_knows_its_evidence():
    split = held_out()
    stream = Stream(split.chance(1), split, 112, frames=2 * 3600 * 3, needles=40)
    chance = split.chance(2)
    for kind in ("sign", "sign_chain"):
        for _ in range(20):
            question = stream.ask(kind, chance, split)
            signs = [stream.signs[frame] for frame in question.needs]
            assert signs[-1].right == question.answer or signs[0].right == question.answer
            if kind == "sign_chain":
                assert signs[0].right == signs[1].left
    assert len(stream.pictures) == 21600
    plain = next(frame for frame in range(21600) if frame not in stream.signs)
    assert len(stream.pictures[plain].marks) == 4
    assert [len(one.marks) for one in stream.pictures[plain : plain + 2]]


def test_scenes_of_a_stream_return():
    split = trained()
    stream = Stream(split.chance(5), split, 112, frames=400, needles=3)
    looks = [stream.pictures[frame].marks.tobytes() for frame in range(400) if frame not in stream.signs]
    runs = [look for look, _ in itertools.groupby(looks)]
    assert len(set(runs)) < len(runs)


def test_a_search_call_names_what_is_looked_for():
    split = trained()
    for seed in range(20):
        chance = split.chance(seed)
        library = Documents(chance, split, (224, 224))
        question, call = look_up(library, chance, split)
        body = json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert body["name"] == "search"
        name, field = body["arguments"]["query"].split()
        assert name in question.text
        assert field in question.text
