"""The config of a run that there is, under further overrides."""

from plait.compose.compose import compose
from plait.compose.recorded import recompose


def test_other_data_are_read_with_the_tokenizer_of_the_run():
    run = compose(["data=text", "data.path=a.txt", "data.tokenizer=mine", "train.seq_len=48"]).plain()
    other = recompose(run, ["data=hf", "data.name=json", "train.steps=3"])
    assert (other.data["name"], other.data["tokenizer"]) == ("json", "mine")
    assert "path" not in other.data
    assert (other.train.seq_len, other.train.steps) == (48, 3)
    assert recompose(run, ["data=hf", "data.name=json", "data.tokenizer=other"]).data["tokenizer"] == "other"
