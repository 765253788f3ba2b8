"""Bad input, end to end: the right error from the drawn tree, saying what to do, and the next request is answered."""

from __future__ import annotations

import base64
import contextlib
import gc
import inspect
import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImages
from PIL.Image import Image as PILImage

import looseleaf
from looseleaf import (
    CancelledError,
    Clip,
    ClosedError,
    Config,
    ConfigError,
    DeepLayers,
    Document,
    EngineConfig,
    FirstK,
    Image,
    LimitError,
    Looseleaf,
    LooseleafError,
    MediaError,
    MediaLimits,
    ModelLoadError,
    PolicyError,
    PromptError,
    QueueFullError,
    Reprefill,
    errors,
)
from looseleaf.model.adapter import Adapter

Open = Callable[..., Looseleaf]
LIMITS = MediaLimits(max_pixels=20_000, max_bytes=30_000)
BUDGET_TOKENS = 600


def picture(size: tuple[int, int] = (84, 56), colour: str = "red") -> PILImage:
    return PILImages.linear_gradient("L").resize(size).convert("RGB").point(lambda one: one ^ len(colour))


def encoded(image: PILImage, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


GOOD: list[Any] = ["Look at", Image(picture()), "and say what it is."]


@pytest.fixture(scope="module")
def ll(adapter_of: Callable[..., Adapter]) -> Iterator[Looseleaf]:
    """One instance for all bad requests, with tight limits: each of them must leave it in order."""
    adapter = adapter_of("qwen2_5_vl")
    engine = EngineConfig(kv_budget_bytes=BUDGET_TOKENS * adapter.layout.row_bytes, max_waiting=2)
    with Looseleaf(adapter, Config(engine=engine, media=LIMITS)) as made:
        yield made


@pytest.fixture(scope="module")
def good(ll: Looseleaf) -> tuple[int, ...]:
    """What a good request is answered with."""
    return ask(ll, GOOD, policy="reprefill", max_tokens=3)


@pytest.fixture
def fresh(opened: Open) -> Looseleaf:
    """An instance of its own, for what would leave another one broken."""
    return opened("qwen2_5_vl")


def ask(ll: Looseleaf, prompt: Any, **options: Any) -> tuple[int, ...]:
    return ll.submit(prompt, **options).result(timeout_s=60).token_ids


def step_through(ll: Looseleaf, prompt: Any, **options: Any) -> tuple[int, ...]:
    """Ask without the driver thread, so that whatever breaks it is raised here."""
    job = ll.engine.submit(ll.request(prompt, **options))
    for _ in range(100):
        if job.done.is_set():
            break
        ll.engine.step()
    if job.error is not None:
        raise job.error
    assert job.answer is not None
    return job.answer.token_ids


def nothing_held(ll: Looseleaf) -> bool:
    """Whether nothing runs and all memory was given back, once the step that answered last is over."""
    with ll.engine.lock:
        return ll.engine.idle and all(len(slab.free) == slab.seats for slab in ll.linker.pool._slabs)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


Case = tuple[Any, dict[str, Any], type[LooseleafError], str]

BAD: dict[str, Case] = {
    "a corrupt image": ([Image(b"no pixels at all"), "What?"], {}, MediaError, "16 bytes is not an image"),
    "a cut off PNG": ([Image(encoded(picture())[:80]), "What?"], {}, MediaError, "is the file complete"),
    "an image without pixels": ([Image(PILImages.new("RGB", (0, 9))), "What?"], {}, MediaError, "at least one pixel"),
    "too many pixels": ([Image(picture((200, 101))), "What?"], {}, LimitError, "raise media.max_pixels"),
    "too many bytes": ([Image(b"\0" * 30_001), "What?"], {}, LimitError, "30,001 bytes; the limit is 30,000"),
    "a data URL of too many bytes": ([Image(data_url(b"\0" * 30_001)), "What?"], {}, LimitError, "the limit is 30,000"),
    "no such file": ([Image("/nowhere/a.png"), "What?"], {}, MediaError, "No such file"),
    "an http URL": ([Image("http://a.example/a.png"), "What?"], {}, MediaError, "pass the file, its bytes or a data:"),
    "an https URL in OpenAI's form": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}]}],
        {}, MediaError, "remote URLs are not fetched",
    ),
    "a data URL without base64": ([Image("data:image/png,abc"), "What?"], {}, MediaError, "looks like data:image/png"),
    "a data URL with bad base64": ([Image("data:image/png;base64,!"), "What?"], {}, MediaError, "base64 is damaged"),
    "a clip without frames": ([Clip([]), "What?"], {}, PromptError, "no frames"),
    "an empty prompt": ([], {}, PromptError, "give at least one segment"),
    "an empty text": ("", {}, PromptError, "give at least a question or an image"),
    "only spaces": ([" ", "\n"], {}, PromptError, "give at least a question or an image"),
    "an empty document": ([Document(""), "What?"], {}, PromptError, "Document is empty"),
    "a segment of another kind": ([7, "What?"], {}, PromptError, r"wrap image files as Image\(path\)"),
    "an unknown role": ([{"role": "root", "content": "x"}], {}, PromptError, "system, user, assistant"),
    "an answer last": (
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], {}, PromptError, "be the user.s",
    ),
    "an image's marker as text": ("See <|image_pad|>", {}, PromptError, "leave it out"),
    "an unknown policy": (GOOD, {"policy": "guess"}, PolicyError, "there are reprefill, prefix-cache"),
    "an empty policy": (GOOD, {"policy": ""}, PolicyError, "there are reprefill, prefix-cache"),
    "a policy's unknown field": (GOOD, {"policy": "first-k:n=3"}, PolicyError, "it has k, relocate"),
    "a policy's field out of range": (GOOD, {"policy": "deviation:7"}, PolicyError, "between 0 and 1, got 7"),
    "a layer the model has not": (GOOD, {"policy": DeepLayers(from_layer=9)}, PolicyError, "4 layers, got 9"),
    "no tokens": (GOOD, {"max_tokens": 0}, ConfigError, "max_tokens must be >= 1, got 0"),
    "a negative temperature": (GOOD, {"temperature": -1}, ConfigError, "temperature must be >= 0, got -1"),
    "a temperature that is no number": (GOOD, {"temperature": float("nan")}, ConfigError, "temperature must be >= 0"),
    "top_p of nothing": (GOOD, {"top_p": 0}, ConfigError, "top_p must be above 0 and at most 1"),
    "top_p above one": (GOOD, {"top_p": 2}, ConfigError, "top_p must be above 0 and at most 1"),
    "a negative top_k": (GOOD, {"top_k": -1}, ConfigError, "top_k must be >= 0"),
    "too many logprobs": (GOOD, {"logprobs": 1000}, ConfigError, "logprobs must be between 0 and 100"),
    "a stop string that is no list": (GOOD, {"stop": "END"}, ConfigError, "tuple of non-empty strings"),
    "an empty stop string": (GOOD, {"stop": [""]}, ConfigError, "tuple of non-empty strings"),
    "an unknown option": (GOOD, {"temprature": 1}, ConfigError, "'temprature'; there are policy, no_store, no_harvest"),
    "a prompt longer than the model": (["x" * 300_000], {}, LimitError, "Shorten the prompt, use fewer images"),
    "an answer longer than the model": (GOOD, {"max_tokens": 10**6}, LimitError, "lower max_tokens"),
    "more than the KV budget": (GOOD, {"max_tokens": BUDGET_TOKENS}, LimitError, "raise engine.kv_budget_bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_the_right_error_and_the_next_request_is_answered(
    ll: Looseleaf, good: tuple[int, ...], name: str
) -> None:
    prompt, options, kind, says = BAD[name]
    with pytest.raises(LooseleafError) as caught:
        ask(ll, prompt, **options)
    assert type(caught.value) is kind
    assert re.search(says, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert nothing_held(ll)
    assert ask(ll, GOOD, max_tokens=3, policy="first-k:1000") == good


@pytest.mark.parametrize("how", ["plan", "submit", "stream_ask", "request"])
def test_every_way_to_ask_refuses_at_once(ll: Looseleaf, how: str) -> None:
    with pytest.raises(MediaError, match="No such file"):
        getattr(ll, how)([Image("/nowhere/a.png"), "What?"])
    with pytest.raises(ConfigError, match="unknown option"):
        getattr(ll, how)("What?", colour="red")


RAW = "the library's own exception is let out"
LATE = "it is not checked when the request is made; an exception of Python's comes out of the engine"
BAD_LATER: dict[str, tuple[Any, dict[str, Any], type[LooseleafError], str]] = {
    "an image too narrow": ([Image(PILImages.new("RGB", (1, 300))), "What?"], {}, MediaError, RAW),
    "base64 with an accent": ([Image("data:image/png;base64,é"), "What?"], {}, MediaError, RAW),
    "a path with a NUL": ([Image("a\0b"), "What?"], {}, MediaError, RAW),
    "an image of nothing": ([Image(None), "What?"], {}, MediaError, RAW),  # type: ignore[arg-type]
    "half a character": ("half a \ud800", {}, PromptError, RAW),
    "no prompt": (None, {}, PromptError, RAW),
    "a bare image": (Image(picture()), {}, PromptError, RAW),
    "a part without its text": ([{"role": "user", "content": [{"type": "text"}]}], {}, PromptError, RAW),
    "a document of a number": ([Document(5), "What?"], {}, PromptError, RAW),  # type: ignore[arg-type]
    "max_tokens as text": (GOOD, {"max_tokens": "3"}, ConfigError, RAW),
    "half a token": (GOOD, {"max_tokens": 1.5}, ConfigError, LATE),
    "temperature as text": (GOOD, {"temperature": "hot"}, ConfigError, RAW),
    "no stop strings": (GOOD, {"stop": 7}, ConfigError, RAW),
    "a stop string of bytes": (GOOD, {"stop": (b"END",)}, ConfigError, LATE),
    "a policy that is a number": (GOOD, {"policy": 42}, PolicyError, LATE),
    "a policy's class": (GOOD, {"policy": FirstK}, PolicyError, LATE),
    "a time to live as text": (GOOD, {"ttl_s": "long", "policy": "full-reuse"}, ConfigError, LATE),
    "a time to live that is no number": (GOOD, {"ttl_s": float("nan")}, ConfigError, "it is taken"),
    "a negative time to live": (GOOD, {"ttl_s": -1}, ConfigError, "it is taken"),
    "a start in front of the first position": (GOOD, {"start_pos": -5}, ConfigError, "it is taken"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name) for name, (_, _, _, reason) in BAD_LATER.items()],
)
def test_other_bad_input_is_refused_as_well(fresh: Looseleaf, name: str) -> None:
    prompt, options, kind, _ = BAD_LATER[name]
    with pytest.raises(kind):
        step_through(fresh, prompt, **{"max_tokens": 2, **options})


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "seed": 2**64}, {"temperature": 1e-40}, {"logprobs": True}], ids=str
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_option_makes_a_caller_wait_for_ever(fresh: Looseleaf, options: dict[str, Any]) -> None:
    try:
        fresh.submit("Hello", max_tokens=2, **options).result(timeout_s=1.0)
    except LooseleafError:
        pass
    finally:
        fresh.engine.close()  # releases whoever waits
    assert fresh._driver is None or fresh._driver.is_alive()


def test_an_image_is_refused_by_a_text_model_which_goes_on(opened: Open) -> None:
    ll = opened("llama")
    for segment in (Image(picture()), Clip([Image(picture())])):
        with pytest.raises(PromptError, match="is a text model: it takes text and Documents"):
            ask(ll, [segment, "What?"])
    assert ask(ll, [Document("A page."), "What?"], max_tokens=2)


def test_a_full_line_refuses_and_whoever_stands_in_it_is_answered(ll: Looseleaf, good: tuple[int, ...]) -> None:
    with ll.engine.lock:  # nobody is admitted meanwhile
        replies = [ll.submit(GOOD, max_tokens=3, policy="reprefill") for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests are waiting already; try again later"):
            ll.submit(GOOD)
    assert [reply.result(timeout_s=60).token_ids for reply in replies] == [good, good]
    assert ask(ll, GOOD, max_tokens=3, policy="reprefill") == good


def test_a_request_may_use_the_whole_kv_budget(ll: Looseleaf) -> None:
    left = BUDGET_TOKENS - len(ll.builder.build("Hi"))
    with pytest.raises(LimitError, match="601 tokens need"):
        ll.submit("Hi", max_tokens=left + 1)
    reply = ll.submit("Hi", max_tokens=left, ignore_eos=True)
    assert len(reply.result(timeout_s=60).token_ids) == left


def test_a_cancelled_request_says_so(ll: Looseleaf, good: tuple[int, ...]) -> None:
    reply = ll.submit("Hi", max_tokens=400, ignore_eos=True)
    assert reply.cancel()
    with pytest.raises(CancelledError, match="was cancelled"):
        reply.result()
    assert nothing_held(ll)
    assert ask(ll, GOOD, max_tokens=3, policy="reprefill") == good


def test_a_closed_instance_says_so(fresh: Looseleaf) -> None:
    ask(fresh, "Hi", max_tokens=1)
    fresh.close()
    with pytest.raises(ClosedError, match="open"):
        fresh.ask("Hi")


def test_a_vision_tower_that_fails_ends_its_request_alone(fresh: Looseleaf, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(fresh.adapter, "see", broken)
        bad = fresh.submit(GOOD, max_tokens=2)
        fine = fresh.submit("Hi", max_tokens=2)
        with pytest.raises(RuntimeError, match="out of memory"):
            bad.result(timeout_s=60)
        assert fine.result(timeout_s=60).token_ids
    assert ask(fresh, GOOD, max_tokens=2)


def test_a_request_that_fails_while_it_is_linked_gives_its_memory_back(
    fresh: Looseleaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(inputs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fresh.adapter, "see", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        step_through(fresh, GOOD)
    assert nothing_held(fresh)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_part_of_a_prefix_costs_time_and_never_a_wrong_answer(fresh: Looseleaf, lost: int) -> None:
    """The block is there when the plan is made and gone when it is read: it expired, or its file was damaged."""
    prompt = ["Look at", Image(picture((112, 112))), "and at these many words behind it. " * 3, "What is it?"]
    right = step_through(fresh, prompt, max_tokens=8, policy=Reprefill(), no_store=True)
    assert step_through(fresh, prompt, max_tokens=8) == right
    get, blocks = fresh.store.get, []

    def losing(key: Any) -> Any:
        if key.part == "sequence":
            blocks.append(key)
            if len(blocks) == lost + 1:
                return None
        return get(key)

    fresh.store.get = losing  # type: ignore[method-assign]
    job = fresh.engine.submit(fresh.request(prompt, max_tokens=8))
    while not job.done.is_set():
        fresh.engine.step()
    assert len(blocks) == lost + 1
    assert fresh.linker.counters.fallbacks == 1
    assert job.answer is not None
    assert job.answer.token_ids == right
    usage = job.answer.usage
    assert usage.exact_tokens == 32 * lost
    assert usage.exact_tokens + usage.fresh_tokens == usage.prompt_tokens


def test_a_finished_reply_may_be_iterated_again(fresh: Looseleaf) -> None:
    reply = fresh.submit("Hi", max_tokens=2, ignore_eos=True)
    first = list(reply)
    again: list[list[str]] = []
    thread = threading.Thread(target=lambda: again.append(list(reply)), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert again[0] in ([], first)


def test_closing_a_stream_nobody_read_cancels_its_request(fresh: Looseleaf) -> None:
    pieces = fresh.stream_ask("Hi", max_tokens=3000, ignore_eos=True)
    try:
        pieces.close()  # type: ignore[attr-defined]
        time.sleep(0.05)
        assert fresh.engine.idle
    finally:
        fresh.engine.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Config(store_bytes=-1), "store_bytes must be >= 0"),
        (lambda: MediaLimits(max_pixels=0), "media.max_pixels must be >= 1"),
        (lambda: EngineConfig(max_running=0), "engine.max_running must be >= 1"),
        pytest.param(
            lambda: Config(canonical="some"), "canonical",
        ),
        pytest.param(
            lambda: Config(policy="guess"), "policy",  # type: ignore[arg-type],
        ),
    ],
)  # fmt: skip
def test_settings_are_checked_where_they_are_born(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
    with pytest.raises(TypeError):
        Config(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("source", "options", "kind", "says"),
    [
        ("tiny:nope", {}, ModelLoadError, "there are qwen2_vl, qwen2_5_vl"),
        ("{folder}/nowhere", {}, ModelLoadError, "neither a folder here nor a model"),
        ("{folder}", {}, ModelLoadError, "config.json, safetensors weights and tokenizer files"),
        ("tiny:llama", {"dtype": "int8"}, ConfigError, "dtype is one of float32"),
        ("tiny:llama", {"max_length": 0}, ConfigError, "max_length must be between 1 and the model's"),
        ("tiny:llama", {"max_length": 10**9}, ConfigError, "max_length must be between 1 and the model's"),
        pytest.param(
            "tiny:llama", {"device": "toaster"}, ConfigError, "device",
        ),
        pytest.param(
            "tiny:llama", {"dtype": 7}, ConfigError, "dtype",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_opened_says_why(
    tmp_path: Path, source: str, options: dict[str, Any], kind: type[LooseleafError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        Looseleaf.open(source.format(folder=tmp_path), **options)


def drawn() -> Iterator[tuple[int, str, int | None, str]]:
    """Depth, name, status and meaning of every line of the tree in the module's docstring."""
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        found = re.match(r"^ {4}((?:[│ ] {3})*(?:[├└]── )?)(\w+Error) +(\d{3})?(?: +(.*))?$", line)
        if found:
            indent, name, status, meaning = found.groups()
            yield len(indent) // 4, name, int(status) if status else None, meaning or ""


def test_the_drawn_tree_is_the_tree() -> None:
    above: list[type] = []
    seen = []
    for depth, name, status, _ in drawn():
        kind = getattr(errors, name)
        assert issubclass(kind, Exception)
        assert kind.status == status, name
        assert kind.__bases__ == ((Exception,) if depth == 0 else (above[depth - 1],)), name
        above[depth:] = [kind]
        seen.append(name)
    classes = [name for name, one in vars(errors).items() if inspect.isclass(one)]
    assert seen == classes, "every class is drawn, in the order of the file"
    assert len(seen) == 12


def test_every_error_is_public_documented_and_has_an_http_status() -> None:
    for _, name, status, _ in drawn():
        kind = getattr(errors, name)
        assert getattr(looseleaf, name) is kind
        assert name in looseleaf.__all__
        assert kind.__doc__
        assert status is not None
        assert 400 <= status < 600


def test_a_stream_may_be_collected_at_any_moment(fresh: Looseleaf) -> None:
    stream = [iter(fresh.submit("Hi", max_tokens=3000, ignore_eos=True))]
    stream.append(stream)  # type: ignore[arg-type]
    door, collected = fresh.engine._door, threading.Event()

    def collect() -> None:
        door.acquire()
        gc.collect()
        collected.set()
        with contextlib.suppress(RuntimeError):  # already let go
            door.release()

    gc.disable()
    try:
        del stream
        threading.Thread(target=collect, daemon=True).start()
        in_time = collected.wait(1.0)
        if not in_time:
            door.release()  # let it go
    finally:
        gc.enable()
        collected.wait(5)
        fresh.engine.close()
    assert in_time
