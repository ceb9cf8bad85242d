"""Items: texts in which pictures stand as references."""

import pytest

from embedtrain.data.images.item import MARK, Picture, has_pictures, item_parts, join_parts, pictures_of, plain

FOX, MAP = Picture(0x12, 640, 427), Picture((1 << 63) - 1, 28, 3000)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        ["text"],
        [FOX],
        [FOX, MAP],
        ["before ", FOX, " between ", MAP, " after"],
        [MAP, MAP, "twice"],
        ["1x1 \n", FOX],
    ],
)
def test_parts_are_kept_in_order(parts: list[str | Picture]) -> None:
    item = join_parts(parts)
    assert item_parts(item) == parts
    assert pictures_of(item) == [part for part in parts if isinstance(part, Picture)]
    assert has_pictures(item) is any(isinstance(part, Picture) for part in parts)


@pytest.mark.parametrize("text", [MARK, f"{MARK}12 1x1{MARK}", str(FOX), f"{str(FOX)[:-1]}", f"a{MARK}{FOX}"])
def test_a_text_of_a_user_names_no_picture(text: str) -> None:
    assert pictures_of(plain(text)) == pictures_of(join_parts([text])) == []
    assert plain("a text") == "a text"


def test_a_broken_reference_is_text() -> None:
    assert item_parts(f"{MARK}12 1x1{MARK} and {FOX}") == [f"{MARK}12 1x1{MARK} and ", FOX]
    assert pictures_of(f"{MARK}{FOX}") == [FOX]
    assert not has_pictures(f"{MARK}0000000000000012 0x5{MARK}")
