"""A window against prompts computed in full: what stays, what is computed again, what branches share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from looseleaf import (
    Auto,
    Clip,
    ConfigError,
    Document,
    FullReuse,
    Image,
    LimitError,
    Looseleaf,
    LowRankKeys,
    MediaError,
    PolicyError,
    PromptError,
    Reprefill,
    Window,
)  # fmt: skip
from looseleaf.link.calibration import Calibration
from looseleaf.link.reference import Way, error
from looseleaf.patch.form import form_patch
from looseleaf.window import window as module
from looseleaf.window.window import bytes_of

Open = Callable[..., Looseleaf]

QUIET = Auto(share=1.0, close="none")


@pytest.fixture
def ll(opened: Open) -> Looseleaf:
    return opened("qwen2_5_vl")


@pytest.fixture
def images() -> list[Image]:
    draw = np.random.default_rng(9)
    return [Image(PILImage.fromarray(draw.integers(0, 256, (56, 84, 3), np.uint8))) for _ in range(6)]


def filled(ll: Looseleaf, images: list[Image], count: int = 3, **options: int) -> Window:
    window = Window(ll, policy=QUIET, **options)
    for image in images[:count]:
        window.push(image)
    window.ask("what?", max_tokens=1)
    ll.settle()
    return window


def uses(window: Window, question: str = "and?") -> list[str]:
    """What happens to each image."""
    pieces = [piece for piece in window.plan(question).pieces if piece.what == "image"]
    return ["kept" if piece.kept and not piece.exact else "exact" if piece.exact and piece.use != "compute" else
            piece.patched or piece.use for piece in pieces]  # fmt: skip


def calibrated(ll: Looseleaf, **more: object) -> None:
    ll.calibration = replace(
        Calibration(
            model="m", fingerprint="f", dtype="d", canonical="c", seed=0, commit="", noise_kl=0.0, ways={}, drifts={},
            survivors=None, share=1.0, from_layer=0, close="words+order", removal=False,
        ),
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_growing_window_is_exact_and_computes_what_is_new(ll: Looseleaf, images: list[Image]) -> None:
    window = Window(ll, policy=QUIET)
    for count in range(1, 5):
        window.push(f"Number {count}:")
        window.push(images[count])
        seen = ll.linker.counters.vision_calls
        answer = window.ask("what is it?", max_tokens=3)
        prompt = [*(page.segment for page in window.pages), "what is it?"]
        assert answer.token_ids == ll.ask(prompt, policy=Reprefill(), max_tokens=3).token_ids
        assert not answer.usage.approximate
        assert ll.linker.counters.vision_calls <= seen + 1
    assert set(uses(window)) == {"exact"}
    assert window.ask("and now?", max_tokens=1).usage.fresh_tokens < 40


def test_survivors_of_a_slide_keep_their_rows_turned_to_their_new_places(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    before = ll.builder.build([*images[:3], "what?"])
    conditioned = ll.linker.prefill(before, ll.request(["x"]).keep)
    assert window.slide() == [1]
    assert uses(window) == ["kept", "kept"]
    built = window._built("and?")
    held = window._held(built, QUIET)
    ll.warm(images[:3])
    patches = {}
    for old, span in zip(before.chunks[1:], built.chunks, strict=True):
        assert span.chunk is not None
        alone = ll.store.get(ll.linker.keys.kv(span.chunk)).rows  # type: ignore[union-attr]
        patches[span.start] = form_patch(conditioned.part(old.start, old.stop), alone, share=1.0)
    kept, by_hand, forgotten = ll.reference.along([
        Way(prompt=built, policy=QUIET, held=held), Way(prompt=built, policy=FullReuse(), patches=patches),
        Way(prompt=built, policy=Reprefill()),
    ])  # fmt: skip
    assert error(kept, by_hand) < 1e-4
    assert error(kept, forgotten) > 1e-4  # they remember what is gone
    answer = window.ask("and?", max_tokens=1)
    assert answer.usage.approximate
    assert answer.usage.kept_tokens == sum(page.tokens for page in window.pages)
    assert "kept by the window" in str(answer.plan)


def test_a_window_told_to_forget_computes_the_rest_again(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    window.slide(forget=True)
    answer = window.ask("and?", max_tokens=2)
    assert not answer.usage.approximate
    assert answer.token_ids == ll.ask([*images[1:3], "and?"], policy=Reprefill(), max_tokens=2).token_ids
    calibrated(ll, removal=True)
    window.slide()
    assert window.pages[0].kept is None
    assert window.slide(0) == []


def test_recall_conditions_a_page_anew_and_tells_who_lacks_it(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    window.evict(1)
    seen = ll.linker.counters.vision_calls
    assert window.recall(1, at=0) == []  # those behind were read behind it
    assert uses(window) == ["exact"] * 3
    window.evict(1)
    assert window.recall(1) == []
    assert uses(window) == ["kept", "kept", "compute"]
    window.ask("and?", max_tokens=1)
    assert uses(window) == ["kept"] * 3
    window.evict(3)
    assert window.recall(3, at=0, cascade=False) == [2, 1]  # page 1 was read behind it, but in another order
    assert uses(window)[1:] == ["kept", "kept"]
    window.ask("and?", max_tokens=1)
    assert ll.linker.counters.vision_calls == seen  # features are stored: nothing is looked at again


def test_a_page_may_lack_what_was_recalled_and_nothing_else(ll: Looseleaf, images: list[Image]) -> None:
    window = Window(ll, policy=QUIET)
    one, two = window.push(images[0]), window.push(images[1])
    window.push(images[2])
    window.evict(one)
    window.ask("and?", max_tokens=1)
    ll.settle()
    assert uses(window)[1] in ("kept", "exact")
    assert window.recall(one, at=0, cascade=False) == [two, 3]
    assert uses(window)[1:] == ["kept", "kept"]
    window.replace(one, images[4])
    assert uses(window)[1:] == ["compute", "compute"]


def test_words_leave_and_return_as_pages_do(ll: Looseleaf, images: list[Image]) -> None:
    window = Window(ll, policy=QUIET)
    words = window.push("Look:")
    window.push(images[0])
    window.ask("what?", max_tokens=1)
    for cascade in (True, False):
        window.evict(words)
        assert window.recall(words, at=0, cascade=cascade) == []
    assert [page.number for page in window.pages] == [words, 2]
    assert window.push(images[1]) == 3
    assert window.fork().push(images[2]) == 4


def test_what_stands_behind_a_replaced_page_is_computed_again(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    window.replace(2, images[4])
    assert uses(window) == ["exact", "compute", "compute"]
    answer = window.ask("and?", max_tokens=2)
    expected = ll.ask([images[0], images[4], images[2], "and?"], policy=Reprefill(), max_tokens=2)
    assert answer.token_ids == expected.token_ids
    assert not answer.usage.approximate


def test_another_order_is_computed_unless_the_calibration_allows_it(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    branch = window.fork()
    window.reorder([2, 1, 3])
    assert uses(window) == ["compute"] * 3  # what stood in front of the second stands behind it now
    calibrated(ll)
    branch.policy = Auto(share=1.0)
    branch.reorder([2, 1, 3])
    assert uses(branch)[2] == "kept"
    with pytest.raises(PromptError, match="every page once"):
        window.reorder([1, 2])


def test_branches_share_what_they_have_in_common(ll: Looseleaf) -> None:
    window = Window(ll, policy=QUIET)
    for number in range(32):
        window.push(Document(f"Page {number} says {number * 7} and more."))
    window.ask("what?", max_tokens=1)
    assert window.nbytes > 0
    branch = window.fork()
    assert bytes_of([window, branch]) == window.nbytes
    branch.push(Document("Something else."))
    assert len(window.pages) == 32
    branch.ask("what?", max_tokens=1)
    assert window.nbytes < bytes_of([window, branch]) < 1.1 * window.nbytes
    branch.evict(1)
    assert window.pages[0].number == 1


def test_conditioning_can_be_switched_off(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    view = window.clean_view(3)
    pieces = [piece for piece in view.plan("and?").pieces if piece.what == "image"]
    assert (pieces[2].use, pieces[2].kept, pieces[2].patched, pieces[2].exact) == ("reuse", False, "", False)
    assert uses(window) == ["exact"] * 3
    built = view._built("and?")
    held = view._held(built, QUIET)
    clean, full = ll.reference.along(
        [Way(prompt=built, policy=QUIET, held=held), Way(prompt=built, policy=Reprefill())]
    )
    assert error(clean, full) > 1e-4
    same = clean.argmax() == full.argmax()
    assert window.disposable(3, "and?", max_tokens=1) == bool(same)
    assert window.pages[2].kept is not None
    words = window.push("some words")
    with pytest.raises(PromptError, match="is words"):
        window.clean_view(words)


def test_the_order_with_the_most_patches_is_found(ll: Looseleaf, images: list[Image]) -> None:
    ll.ask([images[2], images[0], images[1], "."], policy=QUIET, max_tokens=1)
    ll.settle()
    window = Window(ll, policy=QUIET)
    numbers = [window.push(image) for image in images]
    assert window.place(numbers[:3]) == [3, 1, 2]
    assert window.place()[:3] == [3, 1, 2]


def test_budgets_hold(ll: Looseleaf, images: list[Image]) -> None:
    tokens = filled(ll, images, 1).tokens
    window = filled(ll, images, 2, budget_tokens=2 * tokens)
    window.push(images[2])
    assert [page.number for page in window.pages] == [2, 3]
    assert [page.number for page in window.evicted] == [1]
    assert window.tokens <= 2 * tokens
    window.recall(1)
    assert [page.number for page in window.pages] == [3, 1]
    with pytest.raises(LimitError, match="budget_tokens"):
        window.replace(3, Document("word " * 500))
    assert isinstance(window.pages[0].segment, Image)
    with pytest.raises(LimitError, match="budget_tokens"):
        window.push(Document("word " * 500))
    assert len(window.pages) == 2
    one_page = tokens * ll.adapter.layout.row_bytes
    small = filled(ll, images[3:], 3, budget_bytes=one_page)  # new ones: known ones would be patched and not kept
    assert small.nbytes <= one_page
    assert [page.kept is not None for page in small.pages] == [False, False, True]


def test_a_saved_window_opens_as_it_was(ll: Looseleaf, images: list[Image], opened: Open, tmp_path: Path) -> None:
    window = Window(ll, policy=QUIET, budget_tokens=4000)
    frames = [image.source for image in images[3:5]]
    for segment in ("Look:", images[0], Document("A page."), Clip(frames, 0.5), images[1], images[2]):  # type: ignore[arg-type]
        window.push(segment)
    first = window.ask("what?", max_tokens=3)
    window.evict(5)
    window.save(tmp_path / "w")
    again = Window.open(ll, tmp_path / "w")
    assert [page.number for page in again.pages] == [page.number for page in window.pages]
    assert [page.number for page in again.evicted] == [5]
    assert (again.budget_tokens, again.policy, again.nbytes) == (4000, QUIET, window.nbytes)
    assert "exact" not in {piece.use for piece in again.plan("and?").pieces if piece.kept}
    assert again.ask("and?", max_tokens=3).token_ids == window.ask("and?", max_tokens=3).token_ids
    assert again.push("more") == 7
    again.recall(5, at=4)
    again.evict(7)
    assert again.ask("what?", max_tokens=3).token_ids == first.token_ids
    other = Window.open(opened("qwen2_5_vl", canonical="none"), tmp_path / "w")
    assert other.nbytes == 0
    assert len(other.pages) == len(window.pages)


def test_damage_costs_time_or_is_named(
    ll: Looseleaf, images: list[Image], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(ll, images).save(tmp_path)
    pages = json.loads((tmp_path / "window.json").read_text())["pages"]
    rows, picture = tmp_path / pages[1]["kept"]["file"], tmp_path / pages[0]["image"]
    data = bytearray(rows.read_bytes())
    data[-5] ^= 64
    rows.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert Window.open(ll, tmp_path).pages[1].kept is None
    assert "damaged" in caplog.text
    picture.write_bytes(b"nothing")
    with pytest.raises(MediaError, match="not an image"):
        Window.open(ll, tmp_path)
    picture.unlink()
    picture.symlink_to("/etc/hostname")
    with pytest.raises(MediaError, match="link"):
        Window.open(ll, tmp_path)
    (tmp_path / "window.json").write_text(json.dumps({"version": 9}))
    with pytest.raises(ConfigError, match="version 9"):
        Window.open(ll, tmp_path)
    for text in ("", "{}", "[]"):
        (tmp_path / "window.json").write_text(text)
        with pytest.raises(ConfigError, match="does not hold"):
            Window.open(ll, tmp_path)
    with pytest.raises(ConfigError, match="does not hold"):
        Window.open(ll, tmp_path / "nowhere")


def test_nothing_is_published_from_rows_of_a_file(
    ll: Looseleaf, images: list[Image], opened: Open, tmp_path: Path
) -> None:
    filled(ll, images).save(tmp_path)
    fresh = opened("qwen2_5_vl")
    window = Window.open(fresh, tmp_path)
    answer = window.ask("and?", max_tokens=2)
    assert answer.usage.approximate
    fresh.settle()
    assert fresh.plan([*images[:3], "and?"], policy="prefix-cache").prefix_tokens == 0
    assert answer.token_ids == ll.ask([*images[:3], "and?"], policy=Reprefill(), max_tokens=2).token_ids


def test_a_save_that_does_not_end_leaves_the_one_before(
    ll: Looseleaf, images: list[Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = filled(ll, images, 2)
    window.save(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    window.replace(1, images[3])
    window.ask("and?", max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            window.save(tmp_path)
    again = Window.open(ll, tmp_path)
    assert again._contents() == filled(ll, images, 2)._contents()
    window.save(tmp_path)
    after = {path.name for path in tmp_path.iterdir()}
    assert len(after) == len(before)
    assert Window.open(ll, tmp_path)._contents() == window._contents()


def test_pages_stay_what_they_were(ll: Looseleaf, images: list[Image], tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    window = Window(ll, policy=QUIET)
    for image in images[:2]:
        image.source.save(shot)  # type: ignore[union-attr]
        window.push(Image(shot))
    shot.unlink()
    assert len(set(window._contents().values())) == 2
    assert window.ask("what?", max_tokens=1).token_ids


def test_rows_of_prefixes_and_patches_are_remembered_too(ll: Looseleaf, images: list[Image]) -> None:
    filled(ll, images, 2)
    again = filled(ll, images, 2)  # everything of it was stored
    again.evict(1)
    assert uses(again) == ["kept"]


def test_questions_by_other_policies_leave_the_window_as_it_is(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images, 2)
    window.evict(1)
    kept = window.pages[0].kept
    plain = window.ask("and?", policy="reprefill", max_tokens=2)
    assert not plain.usage.approximate
    assert window.pages[0].kept is kept
    for policy in ("full-reuse:relocate=false", "low-rank-keys"):
        with pytest.raises(PolicyError, match="binds rows"):
            window.ask("and?", policy=policy)
    with pytest.raises(PolicyError, match="clean view"):
        window.clean_view(2).ask("and?", policy="prefix-cache")


def test_rows_are_not_bound_where_a_policy_would_misplace_them(ll: Looseleaf, images: list[Image]) -> None:
    """Whoever goes past the window's own check does not get rows that are called exact and are not."""
    window = filled(ll, images)
    built = window._built("and?")
    held = window._held(built, QUIET)
    for policy in (FullReuse(relocate=False), LowRankKeys(rank=1), Reprefill()):
        assert not any(piece.kept for piece in ll.linker.plan(built, policy, held).pieces)


def test_evicted_pages_can_be_let_go(ll: Looseleaf, images: list[Image], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVICTED", 2)
    window = filled(ll, images, 5)
    window.slide(4)
    assert [page.number for page in window.evicted] == [3, 4]
    window.drop(3)
    with pytest.raises(PromptError, match="not among"):
        window.drop(3)


def test_mistakes_are_named(ll: Looseleaf, images: list[Image]) -> None:
    window = filled(ll, images)
    for act in (window.evict, window.recall, window.clean_view):
        with pytest.raises(PromptError, match="77"):
            act(77)
    with pytest.raises(PromptError, match="question"):
        window.ask("  ")
    with pytest.raises(PromptError, match="takes text"):
        window.push(5)  # type: ignore[arg-type]
    with pytest.raises(MediaError):
        window.push(Image("nowhere.png"))
    with pytest.raises(ConfigError, match="budget_tokens"):
        Window(ll, budget_tokens=-1)
    window.evict(1)
    with pytest.raises(ConfigError, match="at must"):
        window.recall(1, at=9)
    assert [page.number for page in window.evicted] == [1]
    assert len(window.pages) == 2
