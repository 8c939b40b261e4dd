"""`plait sample`: the same text in every layout, what is drawn, and what is refused before a rank starts."""

import shutil
from unittest import mock

import pytest
import torch

from plait import PlaitError, apply
from plait.host import RunFolder, build_model, build_source, compose, fit
from plait_use.next_token import Draw
from plait_use.writing import Prompts, write

DENSE = ["model=llama3_debug", "model.dim=32", "model.ffn_dim=48", "model.n_layers=2", "model.n_heads=4"]
MOE = ["model=deepseek_v3_debug"]
SMALL = ["train.seq_len=64", "precision.storage=float64", "precision.param=float64", "precision.reduce=float64"]
RUN = ["train.steps=2", "train.seq_len=64", "train.local_batch_size=2", "validation.batches=2", "checkpoint.interval=1"]
LAYOUTS = {
    "alone": ([], 1),
    "tensor_parallel": (["strategy=[tensor_parallel]"], 2),
    "context_parallel": (["strategy=[context_parallel,fsdp2]"], 2),
    "pipeline": (["strategy=[pipeline]"], 2),
    "expert_parallel": (["strategy=[expert_parallel,fsdp2]"], 2),
}
QUICK = ("alone", "tensor_parallel", "pipeline")
TEXTS = ["def f", "class A"]
TOKENS = 6
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 3}


def written(model, layout, draw):
    """What one rank of this layout writes with initial weights."""
    return write(compose([*model, *SMALL, *layout]), None, TEXTS, False, TOKENS, draw)


def by_hand(draw):
    """The same by a plain loop over a plain model, without padding."""
    config = compose([*DENSE, *SMALL])
    model = apply(*build_model(config.model), precision=config.precision).parts[0].eval()
    source, texts = build_source(config.data), []
    for number, text in enumerate(TEXTS):
        ids = source.encoded(text)
        first = len(ids)
        for place in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[0, -1, : source.vocabulary]
            ids.append(Draw(**draw).token(logits.double(), number, place))
        texts.append(ids[first:])
    return texts


@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_every_layout_writes_the_same(layout, plait_ranks):
    options, world = LAYOUTS[layout]
    if layout == "expert_parallel":
        model, expected = MOE, plait_ranks.once(written, MOE, [], DRAWN, world=1)[0]
    else:
        model, expected = DENSE, plait_ranks.once(by_hand, DRAWN, world=1)[0]
    assert plait_ranks.run(written, model, options, DRAWN, world=world) == [expected] * world
    assert len({*expected[0], *expected[1]}) > 4  # not the same token again and again


def test_the_most_likely_token_is_taken_without_a_temperature(plait_ranks):
    assert plait_ranks.run(written, DENSE, [], GREEDY, world=1) == plait_ranks.run(by_hand, GREEDY, world=1)


def test_draws_have_the_asked_for_chances():
    logits = torch.tensor([1.0, 3.0, 2.0, -40.0], dtype=torch.float64)

    def counts(**options):
        drawn = [Draw(**options).token(logits, 0, place) for place in range(1500)]
        return [drawn.count(token) / 1500 for token in range(4)]

    assert counts() == pytest.approx(logits.softmax(0).tolist(), abs=0.04)
    assert counts(temperature=2.0) == pytest.approx((logits / 2).softmax(0).tolist(), abs=0.04)
    assert counts(top_k=2) == pytest.approx([0, *torch.tensor([3.0, 2.0]).softmax(0).tolist(), 0], abs=0.04)
    assert counts(top_p=0.6) == [0, 1, 0, 0]  # the first alone has 0.67
    assert counts(top_p=0.7)[0] == 0
    assert counts(seed=1) != counts(seed=2)


def test_a_text_ends_at_its_end(plait_ranks):
    def ended():
        from plait_use import writing

        whole = writing.write(compose([*DENSE, *SMALL]), None, ["a"], False, 5, GREEDY)[0]
        with mock.patch.object(writing, "build_source", lambda node: Ending(build_source(node), whole[1])):
            return whole, writing.write(compose([*DENSE, *SMALL]), None, ["a"], False, 5, GREEDY)[0]

    ((whole, short),) = plait_ranks.run(ended, world=1)
    assert short == whole[: whole.index(whole[1]) + 1] != whole


def test_typed_prompts_are_answered_by_all_ranks_as_given_ones(plait_ranks):
    """A prompt of two lines, one that has no room, which is said, and a second one; then the terminal's end."""
    lines = ["def f\\", "(x):", "x" * 64, "class A"]

    def typed(texts):
        shown, keys = [], iter(lines)

        def line():
            if (said := next(keys, None)) is None:
                raise EOFError
            return said

        def show(*words, end="\n", flush):
            shown.append("".join(map(str, words)) + end)

        with mock.patch("builtins.input", line), mock.patch("builtins.print", show):
            new = write(compose([*DENSE, *SMALL, "strategy=[tensor_parallel]"]), None, texts, False, TOKENS, GREEDY)
        return new, "".join(shown)

    (typed_first, said), (typed_second, nothing) = plait_ranks.run(typed, None, world=2)
    given, text = plait_ranks.run(typed, ["def f\n(x):", "class A"], world=2)[0]
    assert typed_first == typed_second == given
    assert nothing == ""
    head, *rest = said.split("> ")
    assert head == "Type a prompt; a line that ends with \\ goes on in the next; Ctrl-D ends.\n"
    assert rest[0].startswith(". "), "the second line of the first prompt"
    assert (
        rest[1] == "the prompt has 64 tokens, and train.seq_len=64 leaves no room for more: shorten it, or raise "
        "train.seq_len\n"
    )
    assert [rest[0].removeprefix(". "), rest[2]] == text.replace("def f\n(x):", "").split("class A")
    assert rest[3] == "\n"


def test_a_full_conversation_forgets_its_beginning(monkeypatch, capsys):
    monkeypatch.setattr("plait_use.writing.dist.get_rank", lambda: 0)
    source = mock.Mock(prompted=lambda messages: [ord(each) for one in messages for each in one["content"]])
    prompts = Prompts(source, 10, chat=True)
    for text, answer in (("ab", "cd"), ("ef", "gh")):
        prompts.answered(text, answer)
    with pytest.raises(PlaitError, match="the prompt has 10 tokens"):
        prompts.ids("i" * 10)  # alone too long
    assert (len(prompts.messages), capsys.readouterr().out) == (4, "")
    assert bytes(prompts.ids("ij")) == b"efghij"
    assert len(prompts.messages) == 2
    assert capsys.readouterr().out == "(the oldest 2 messages are dropped: train.seq_len=10 is full)\n"
    assert bytes(prompts.ids("ij")) == b"efghij"


class Ending:
    """A source whose texts end with another token."""

    def __init__(self, source, ends):
        self.source, self.ends = source, ends

    def __getattr__(self, name):
        return getattr(self.source, name)

    def special_ids(self):
        return [self.ends], None


def trained(folder, *options):
    fit(compose([*DENSE, *RUN, *options]), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, plait_ranks):
    """A folder with a run `done` of two steps, one `empty` without a checkpoint, and one `cut` that is damaged."""
    here = tmp_path_factory.mktemp("runs")
    for name in ("done", "empty"):
        folder = here / "runs" / name
        folder.mkdir(parents=True)
        RunFolder(folder).write_config(compose([*DENSE, *RUN, f"run.name={name}"]).plain())
        RunFolder(folder).write_versions({})
    plait_ranks.run(trained, here / "runs" / "done", "strategy=[fsdp2]", world=2)
    shutil.copytree(here / "runs" / "done", here / "runs" / "cut")
    next((here / "runs" / "cut" / "checkpoints" / "step-2").glob("*.distcp")).unlink()
    shutil.rmtree(here / "runs" / "cut" / "checkpoints" / "step-1")
    return here


@pytest.mark.slow
def test_what_another_layout_has_trained_is_sampled_from(runs, plait_project, monkeypatch):
    monkeypatch.chdir(runs)
    told = plait_project("sample", "done", "def f", "tokens=5", ranks=None)
    assert (told.code, told.err) == (0, "model: runs/done/checkpoints/step-2, step 2\n")
    assert told.out.startswith("def f")
    assert len(told.out) > len("def f\n")


@pytest.mark.slow
def test_a_checkpoint_and_its_export_write_the_same(plait_project):
    done = plait_project("train", *DENSE, *RUN, "run.name=done", ranks=1)
    assert done.code == 0, done.err
    told = [
        plait_project("sample", word, "def f", "tokens=20", *options, ranks=ranks)
        for word, options, ranks in (
            ("done", [], 1),
            ("runs/done/checkpoints/step-2", ["strategy=[pipeline]"], 2),
            ("runs/done/export", ["strategy=[fsdp2]"], 2),
        )
    ]
    assert {each.code for each in told} == {0}
    assert len({each.out for each in told}) == 1


REFUSED = {
    "a run that is not there": (["dome", "a"], "dome is not there; it must be a run"),
    "the near miss": (["dome", "a"], "did you mean 'done'?"),
    "a run without a checkpoint": (["empty", "a"], "has saved nothing yet"),
    "a damaged checkpoint": (["cut", "a"], "step-2: its file"),
    "a step that is not there": (["runs/done/checkpoints/step-9", "a"], "is not there"),
    "a folder of something else": (["runs", "a"], "runs is none: it must be a run"),
    "a prompt that is too long": (["done", "a" * 64], "the prompt has 64 tokens, and train.seq_len=64 leaves no room"),
    "an empty prompt": (["done", ""], "an empty prompt"),
    "a word that is unknown": (
        ["done", "a", "tmperature=1"],
        "unknown key tmperature; plait sample takes tokens, temperature, ",
    ),
    "its beginning": (["done", "a", "temp=1"], "did you mean 'temperature'?"),
    "no number": (["done", "a", "temperature=hot"], "temperature is 'hot'; it must be a number of at least 0"),
    "a chance of 0": (["done", "a", "top_p=0"], "top_p is '0'"),
    "no chat template": (["done", "a", "--chat"], "must be a folder with tokenizer.json and a chat template"),
    "another model": (["done", "a", "model.dim=64"], "is of another model"),
    "several machines": (["done", "a", "launch.nnodes=2"], "this runs on one machine"),
    "a tokenizer that is gone": (["done", "a", "data.tokenizer=gone.json"], "data.tokenizer='gone.json'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_a_rank_starts(case, runs, plait_project, monkeypatch):
    monkeypatch.chdir(runs)
    words, sentence = REFUSED[case]
    told = plait_project("sample", *words)
    (line,) = (line for line in told.err.splitlines() if not line.startswith("check: "))
    assert told.code == 1
    assert sentence in line
