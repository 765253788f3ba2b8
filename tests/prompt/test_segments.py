"""What callers may write as a prompt, and what they are told when it is none."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image as PILImages

from looseleaf.errors import PromptError
from looseleaf.prompt.segments import ROLES, Clip, Document, Image, Message, as_messages

PICTURE = PILImages.new("RGB", (4, 4), "red")
SEEN = Image(PICTURE)


def test_a_string_is_a_users_message() -> None:
    assert as_messages("Hello") == (Message("user", ("Hello",)),)


def test_a_list_of_segments_is_one_users_message_in_order() -> None:
    document, clip = Document("text"), Clip([SEEN, SEEN])
    (message,) = as_messages(["See", SEEN, document, clip, "well?"])
    assert message == Message("user", ("See", SEEN, document, clip, "well?"))


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_any_sequence_will_do(kind: Any) -> None:
    assert as_messages(kind(["a", SEEN])) == (Message("user", ("a", SEEN)),)


def test_a_bare_picture_is_an_image() -> None:
    (message,) = as_messages([PICTURE, "well?"])
    assert message.content[0] == Image(PICTURE)


def test_messages_may_be_objects_or_mappings() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        Message("user", ("Hi", SEEN)),
        {"role": "assistant", "content": ["Hello"]},
        {"role": "user", "content": [SEEN, "Well?"]},
    ]
    assert as_messages(turns) == (
        Message("system", ("Be brief.",)),
        Message("user", ("Hi", SEEN)),
        Message("assistant", ("Hello",)),
        Message("user", (SEEN, "Well?")),
    )


def test_openais_content_parts_are_understood() -> None:
    url = "data:image/png;base64,AAAA"
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "image": PICTURE},
    ]
    (message,) = as_messages([{"role": "user", "content": parts}])
    assert message.content == ("What is this?", Image(url), Image(url), Image(PICTURE))


def test_empty_words_beside_an_image_are_fine() -> None:
    assert as_messages(["", SEEN])
    assert as_messages([SEEN])
    assert as_messages([Document("x")])
    assert as_messages([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, Message("user", ("x",))])


BAD: list[Any] = [
    ([], "empty: give at least one segment"),
    ("", "last user message is empty"),
    ("  \n", "last user message is empty"),
    (["", " "], "last user message is empty"),
    ([{"role": "user", "content": []}], "last user message is empty"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": ""}], "last user message is empty"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "last message must be the user's"),
    ([{"role": "system", "content": "x"}], "last message must be the user's"),
    ([{"role": "tool", "content": "x"}], "role is one of system, user, assistant, got 'tool'"),
    ([{"role": "User", "content": "x"}], "role is one of"),
    ([{"role": None, "content": "x"}], "role is one of"),
    ([{"role": ["user"], "content": "x"}], "role is one of"),
    ([{"content": "x"}], "keys role and content, got .'content'"),
    ([{"role": "user"}], "keys role and content"),
    ([{"role": "user", "content": "x", "name": "bob"}], "keys role and content, got .*'name'"),
    ([{}], "keys role and content"),
    ([1], "text, Image, Document or Clip, got int"),
    ([b"bytes"], "text, Image, Document or Clip, got bytes"),
    ([None], "got NoneType"),
    (["a", ["b"]], "got list"),
    (b"bytes", "got int"),
    ([Message("user", ("x",)), "y"], "got Message"),
    ([{"role": "user", "content": [{"type": "audio"}]}], "type 'audio' is unknown; use text, image or image_url"),
    ([{"role": "user", "content": [{}]}], "type None is unknown"),
    ([{"role": "user", "content": [7]}], "got int"),
    pytest.param(None, "prompt"),
    pytest.param(7, "prompt"),
    pytest.param(SEEN, "prompt"),
    pytest.param(PICTURE, "prompt"),
    pytest.param(Message("user", ("x",)), "prompt"),
    pytest.param({"role": "user", "content": "x"}, "prompt"),
    pytest.param([{"role": "user", "content": None}], "content"),
    pytest.param([{"role": "user", "content": 7}], "content"),
    pytest.param([{"role": "user", "content": {"type": "text", "text": "x"}}], "content"),
    pytest.param([{"role": "user", "content": [{"type": "text"}]}], "text"),
    pytest.param([{"role": "user", "content": [{"type": "text", "text": None}]}], "text"),
    pytest.param([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    pytest.param([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
    pytest.param([{"role": "user", "content": [{"type": "image_url", "image_url": None}]}], "image_url"),
    pytest.param([{"role": "user", "content": [{"type": "image"}]}], "image"),
    pytest.param([{"role": "user", "content": "x", 5: "y"}], "keys role and content"),
    pytest.param([Message("user", ("x", 7))], "got int"),  # type: ignore[arg-type]
    pytest.param([Message("user", ({"type": "audio"},))], "audio"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("prompt", "says"), BAD, ids=lambda value: repr(value)[:60])
def test_anything_else_is_refused_with_what_is_expected(prompt: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        as_messages(prompt)


def test_a_picture_inside_a_message_object_is_an_image_too() -> None:
    (message,) = as_messages([Message("user", (PICTURE, "well?"))])  # type: ignore[arg-type]
    assert message.content[0] == Image(PICTURE)


def test_a_single_image_may_be_a_messages_content() -> None:
    assert as_messages([{"role": "user", "content": SEEN}]) == (Message("user", (SEEN,)),)


def test_a_turn_without_words_is_understood_or_refused() -> None:
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "y"},
    ]
    try:
        messages = as_messages(turns)
    except PromptError:
        return
    assert not "".join(map(str, messages[1].content))


def test_an_image_url_is_a_url_and_not_a_path_on_this_machine() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "/etc/hostname"}}, {"type": "text", "text": "Read it."}]
    with pytest.raises(PromptError, match="URL"):
        as_messages([{"role": "user", "content": parts}])


def test_every_role_is_accepted_somewhere() -> None:
    for role in ROLES:
        assert as_messages([{"role": role, "content": "x"}, {"role": "user", "content": "y"}])[0].role == role
