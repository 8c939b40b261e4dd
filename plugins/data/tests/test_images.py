"""Images in the text and among the tokens of a conversation; how a model sees them is tested where that model is."""

import numpy as np

from plait.testing import raises_about
from plait_data.images import Image, Images

SOFT, BREAK, SIZE = 7, 8, 100
IMAGES = Images(
    "F", "<mark>", SOFT, {"a": Image("[s|s]", [2, 1], SIZE), "b": Image("\n[s]\n", [3], SIZE + 3)}, "digest"
)


def test_texts_and_then_tokens_take_the_place_of_marks():
    assert IMAGES.written("x <mark>y<mark>", ["b", "a"], "f:1") == "x \n[s]\ny[s|s]"
    ids = np.array([1, SOFT, 2, SOFT, BREAK, SOFT, 3], np.uint32)
    found, learned = IMAGES.expanded(["b", "a"], ids, np.ones(7, bool), "f:1")
    assert found.dtype == ids.dtype
    assert found.tolist() == [1, 103, 104, 105, 2, 100, 101, BREAK, 102, 3]
    assert learned.tolist() == [True, False, False, False, True, False, False, False, False, True]


def test_what_does_not_fit_its_images_is_refused():
    with raises_about("data.template", None, "a template that writes one mark for each image"):
        IMAGES.written("<mark> and <mark>", ["a"], "f:1")
    with raises_about("data.images", "c"):
        IMAGES.written("<mark>", ["c"], "f:1")
    with raises_about("data.template", None, "a template that writes one mark for each image"):  # a message spells it
        IMAGES.expanded(["b"], np.array([SOFT, SOFT], np.uint32), np.ones(2, bool), "f:1")
