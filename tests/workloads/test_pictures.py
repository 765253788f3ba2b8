import numpy as np
import pytest
import torch

from looseleaf.training.painter import Painter
from looseleaf.workloads.albums import HEADLINE, Album, task_album
from looseleaf.workloads.masks import CHARACTERS, LETTER_SIZES, SHAPE_SIZES, SHAPES, fonts, sheets
from looseleaf.workloads.pictures import Picture, draw
from looseleaf.workloads.questions import held_out, held_out_fonts, trained

SPLITS = {"trained": trained(), "held-out": held_out(), "fonts": held_out_fonts()}


def album_of(task: str, split: str, seed: int) -> Album:
    chance = SPLITS[split].chance("test", seed)
    size = (112, 112) if task in ("clip", "stream") else [(224, 224), (168, 224), (196, 252), (224, 168)][seed % 4]
    return task_album(task, chance, SPLITS[split], size, 5)


def pictures_of(task: str, split: str, seed: int) -> list[Picture]:
    return [one for one in album_of(task, split, seed).entries if isinstance(one, Picture)]


def test_every_mask_is_there_and_no_two_shapes_look_alike():
    shapes, letters = sheets()
    assert len(shapes) == len(SHAPE_SIZES) * len(SHAPES)
    assert len(letters) == len(fonts()[2]) * len(LETTER_SIZES) * len(CHARACTERS)
    for size in range(len(SHAPE_SIZES)):
        ours = shapes[size * len(SHAPES) : (size + 1) * len(SHAPES)].astype(float).reshape(len(SHAPES), -1)
        apart = [np.abs(a - b).mean() for i, a in enumerate(ours) for b in ours[:i]]
        assert min(apart) > 4
    assert letters.reshape(len(letters), -1).any(axis=1).all()


def test_fonts_never_trained_on_come_with_the_package():
    usual, held, paths = fonts()
    assert len(usual) >= 12
    assert len(held) >= 3
    assert not set(usual) & set(held)
    assert set(SPLITS["trained"].fonts) == set(usual)
    assert set(SPLITS["fonts"].fonts) == set(held)
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", [task for task in HEADLINE if "text" not in task])
def test_training_paints_what_the_product_draws(task: str, split: str):
    painter = Painter("cpu")
    for seed in range(4):
        pictures = pictures_of(task, split, seed)
        marks = [np.insert(one.marks.astype(np.int32), 0, number, axis=1) for number, one in enumerate(pictures)]
        grounds = torch.tensor([one.ground for one in pictures], dtype=torch.float32)
        height, width = pictures[0].height, pictures[0].width
        every = torch.from_numpy(np.concatenate(marks))
        painted = painter.paint(every[every[:, 1] == 0], every[every[:, 1] == 1], grounds, height, width)
        drawn = np.stack([np.asarray(draw(one)) for one in pictures])
        off = (painted.permute(0, 2, 3, 1) * 255).round().numpy() - drawn
        assert np.abs(off).max() <= 1
        assert (off != 0).mean() < 1e-3


@pytest.mark.parametrize("task", [task for task in HEADLINE if "text" not in task])
def test_marks_lie_inside_and_do_not_overlap(task: str):
    masks = sheets()
    for split in SPLITS:
        for seed in range(12):
            for picture in pictures_of(task, split, seed):
                covered = np.zeros((picture.height + 88, picture.width + 88), dtype=int)
                for sheet, mask, left, top, *_ in picture.marks.tolist():
                    cover = masks[sheet][mask] > 40
                    side = len(cover)
                    covered[top + 44 : top + 44 + side, left + 44 : left + 44 + side] += cover
                assert (covered > 1).sum() <= 8, (task, split, seed)  # letters of some fonts touch
                inside = covered[44:-44, 44:-44]
                assert covered.sum() - inside.sum() <= 2, (task, split, seed)


def test_a_picture_is_the_same_for_the_same_seed_and_another_for_another():
    first, again, other = (draw(pictures_of("legend", "trained", seed)[0]).tobytes() for seed in (4, 4, 8))
    assert first == again
    assert first != other


def test_a_planted_mark_is_noticed_by_the_comparison():
    picture = pictures_of("legend", "trained", 0)[0]
    marks = picture.marks.copy()
    marks[0, 2] += 3
    moved = Picture(picture.width, picture.height, picture.ground, marks)
    assert draw(moved).tobytes() != draw(picture).tobytes()
