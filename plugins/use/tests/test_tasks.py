"""`plait eval RUN tasks=...`: lm-eval asks the model the same in every layout as one process by hand."""

import json

import pytest
import torch

from plait import apply
from plait.host import Outcome, RunFolder, build_model, build_source, compose, fit, load_model
from plait_use.trained import find

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'plait-use[tasks]'")

SMALL = ["model=llama3_debug", "model.dim=32", "model.ffn_dim=48", "model.n_layers=2", "model.n_heads=4"]
SMALL += ["train.seq_len=64", "precision.storage=float64", "precision.param=float64", "precision.reduce=float64"]
PAIRS = [("def ", "f(x):"), ("", "class"), ("a" * 60, "b" * 9)]
LAYOUTS = {
    "alone": ([], 1),
    "context_parallel": (["strategy=[context_parallel,fsdp2]"], 2),
    "tensor_parallel": (["strategy=[tensor_parallel]"], 2),
    "pipeline": (["strategy=[pipeline]"], 2),
}
CHOICE = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
OF_KIND = {
    "multiple_choice": 'doc_to_choice: [" one", " two"]\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n',
    "generate_until": 'doc_to_target: " one"\ngeneration_kwargs: {until: ["."], max_gen_toks: 4}\n'
    "metric_list: [{metric: exact_match}]\n",
}


class Asked:
    def __init__(self, *args):
        self.args = args


def likelihoods(layout):
    from plait_use.language_model import LanguageModel

    config = compose([*SMALL, *layout])
    model = LanguageModel(load_model(config), build_source(config.data), 64)
    assert (model.rank, model.world_size) == (0, 1), "lm-eval would deal its requests to the ranks"
    sums = model.loglikelihood([Asked(*pair) for pair in PAIRS], disable_tqdm=True)
    rolling = model.loglikelihood_rolling([Asked("x" * 100)])
    return sums, rolling, model.generate_until([Asked("def ", {"until": [], "max_gen_toks": 3})])


def by_hand():
    """The same sums from a plain model: of the bytes, after id 256 where nothing is before them."""
    config = compose(SMALL)
    model = apply(*build_model(config.model), precision=config.precision).parts[0].eval()

    def score(context, said):
        ids = [*context, *said]
        with torch.no_grad():
            logs = model(torch.tensor([ids[:-1][-64:]]))[0, :, :257].double().log_softmax(-1)
        rows = logs[-len(said) :]
        return sum(float(row[token]) for row, token in zip(rows, said, strict=True)), all(
            int(row.argmax()) == token for row, token in zip(rows, said, strict=True)
        )

    pairs = [([*b"def"], [*b" f(x):"]), ([256], [*b"class"]), ([*b"a" * 60], [*b"b" * 9])]
    return [score(*pair) for pair in pairs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_scores_as_one_process(layout, plait_ranks):
    options, world = LAYOUTS[layout]
    (expected,) = plait_ranks.once(by_hand, world=1)
    told = plait_ranks.run(likelihoods, options, world=world)
    assert all(each == told[0] for each in told)
    sums, (rolling,), (text,) = told[0]
    assert [value for value, _ in sums] == pytest.approx([value for value, _ in expected], rel=1e-12)
    assert [greedy for _, greedy in sums] == [greedy for _, greedy in expected]
    assert rolling < 0
    alone = plait_ranks.once(likelihoods, [], world=1)[0]
    assert (rolling, text) == (pytest.approx(alone[1][0], rel=1e-12), alone[2][0])


def tasks_in(folder):
    """Two tasks of one's own: which of two words follows, and what is written."""
    rows = [{"question": f"{i} is", "answer": i % 2} for i in range(4)]
    (folder / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    for name, kind in (("pick", "multiple_choice"), ("say", "generate_until")):
        task = CHOICE.format(name=name, file=folder / "rows.json", kind=kind) + OF_KIND[kind]
        (folder / f"tasks/{name}.yaml").write_text(task)
    return folder / "tasks"


def trained(folder):
    config = compose([*SMALL, "train.steps=1", "train.local_batch_size=2", "validation.interval=0"])
    RunFolder(folder).write_config(config.plain())
    fit(config, folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory, plait_ranks):
    folder = RunFolder(tmp_path_factory.mktemp("tasks") / "done")
    folder.path.mkdir()
    folder.write_versions({})
    plait_ranks.run(trained, folder.path, world=1)
    return folder.path


def asked(path, layout, tasks, limit):
    from plait_use.language_model import answered

    found = find(str(path), layout)
    return answered(found.for_logits, str(found.checkpoint), ["pick", "say"], str(tasks), 1, limit)


def test_tasks_have_the_same_results_in_every_layout(plait_ranks, run, tmp_path):
    tasks = tasks_in(tmp_path)
    (alone,), both = (
        plait_ranks.run(asked, run, layout, tasks, 3, world=world)
        for layout, world in ((["strategy=[]"], 1), (["strategy=[tensor_parallel]"], 2))
    )
    assert both == [alone, alone]
    assert alone["pick"]["acc,none"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1), "of three questions"
    assert alone["say"]["exact_match,none"] == 0


RESULTS = {
    "pick": {"acc,none": 0.25, "acc_stderr,none": 0.125, "sample_len": 4},
    "say": {"exact,first": 1.0},
}
TABLE = """\
task  metric  value   standard error
pick  acc     0.2500  0.1250
say   exact   1.0000"""


def test_what_is_asked_and_printed(plait_project, run, tmp_path):
    given = []

    def ranks(config, folder, *_):
        given.append(json.loads((folder.path / "task.json").read_text()))
        (folder.path / "answer.json").write_text(json.dumps(RESULTS))
        return Outcome("finished", "")

    words = ["eval", str(run), "tasks=pick,say", f"tasks_dir={tasks_in(tmp_path)}", "shots=2", "limit=3"]
    told = plait_project(*words, ranks=ranks)
    assert told.code == 0, told.err
    assert [line.rstrip() for line in told.out.splitlines()[-3:]] == TABLE.splitlines()
    assert given[0]["arguments"]["tasks"] == ["pick", "say"]
    assert (given[0]["arguments"]["shots"], given[0]["arguments"]["limit"]) == (2, 3)
    told = plait_project(*words, "--json", ranks=ranks)
    assert json.loads(told.out.splitlines()[-1]) == {
        "model": str(run / "checkpoints/step-1"),
        "step": 1,
        "tasks": RESULTS,
    }


def test_a_task_that_there_is_not_is_refused_before_a_rank_starts(plait_project, run, tmp_path):
    wrong = plait_project("eval", str(run), "tasks=pck", f"tasks_dir={(tasks := tasks_in(tmp_path))}")
    says = f"plait: tasks=pck: {tasks} has no such task; did you mean 'pick'?"
    assert (wrong.code, wrong.err.splitlines()[-1]) == (1, says)


@pytest.mark.slow
def test_tasks_of_ones_own(plait_project):
    tasks_in(plait_project.path)
    done = plait_project("train", *SMALL, "train.steps=1", "train.local_batch_size=2", "run.name=done", ranks=1)
    assert done.code == 0, done.err
    told = plait_project("eval", "done", "tasks=pick,say", "tasks_dir=tasks", "strategy=[fsdp2]", "--json", ranks=2)
    assert told.code == 0, told.err
    tasks = json.loads(told.out)["tasks"]
    assert tasks["pick"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
    assert tasks["say"]["exact_match,none"] == 0
