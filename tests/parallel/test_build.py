"""What a model's YAML gives is plain Python when it arrives in the constructor."""

from plait.parallel.build import make


def test_lists_and_mappings_arrive_as_such():
    made = make({"_target_": "builtins.dict", "sizes": [1, [2]], "rope": {"factors": [1.0]}}, "model")
    assert type(made["sizes"]) is type(made["sizes"][1]) is type(made["rope"]["factors"]) is list
    assert type(made["rope"]) is dict
