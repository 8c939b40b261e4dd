"""What a YAML gives is plain Python when it arrives in the constructor, and what is made of it is what is needed."""

from types import SimpleNamespace

from plait.compose.targets import build_source, make
from plait.data.source import Source
from plait.testing import raises_about


def test_lists_and_mappings_arrive_as_such():
    made = make({"_target_": "builtins.dict", "sizes": [1, [2]], "rope": {"factors": [1.0]}}, "model")
    assert type(made["sizes"]) is type(made["sizes"][1]) is type(made["rope"]["factors"]) is list
    assert type(made["rope"]) is dict


def nearly(**lacks):
    """An object with all of a source but what it lacks."""
    names = ("check", "prepare", "check_length", "fingerprint", "open", "encoder", "has_validation", "indexable")
    return SimpleNamespace(**{name: getattr(Source, name, True) for name in names if name != lacks["lacks"]})


def test_an_object_that_lacks_a_part_of_a_source_is_refused():
    target = f"{__name__}.nearly"
    build_source({"_target_": target, "lacks": "nothing"})
    for lacks in ("open", "fingerprint", "prepare", "has_validation"):
        with raises_about("data._target_", target, "a source of data"):
            build_source({"_target_": target, "lacks": lacks})
