"""`plait push`: publishes exported weights with a model card."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Parser

CARD = "README.md"

help = "publish a trained model on the Hugging Face hub, with a model card"


def arguments(parser: "Parser") -> None:
    parser.description = """\
Uploads the exported weights of RUN to the repository REPO of the Hugging Face hub, in one commit, with a README.md that
is written from what the run recorded: results, data, values, layout and versions. RUN is a run or its name, or
its exported folder. Secrets are left out, and absolute paths are shortened to their last part."""
    parser.add_argument("run", metavar="RUN", help="what is published")
    parser.add_argument("repo", metavar="REPO", help="such as me/my-model; it is made if it is not there")
    parser.add_argument("--dry-run", action="store_true", help="only show the card and the files")
    parser.add_argument("--folder", metavar="OUT", help="write the card and the files to the new folder OUT instead")
    parser.add_argument("--private", action="store_true", help="make a new repository private")


def run(args: "Namespace") -> int:
    from plait import misfit
    from plait_use.card import NAME, card

    if not NAME.fullmatch(args.repo):
        raise misfit("REPO", args.repo, "an owner and a name, such as me/my-model")
    weights, folder = published(args.run)
    text = card(args.repo, folder, ended=is_own(weights, folder))
    files = sorted(each for each in weights.iterdir() if each.is_file() and each.name != CARD)
    if args.dry_run:
        print(text)
    if args.dry_run or args.folder:
        if args.folder:
            _write(Path(args.folder), files, text)
        for name, size in [(CARD, len(text.encode())), *((each.name, each.stat().st_size) for each in files)]:
            print(f"{size:>16,} bytes  {name}")
        return 0
    print(_upload(args.repo, files, text, args.private))
    return 0


def published(word: str) -> tuple[Path, Path]:
    """(the folder of weights that `word` means, the folder of their run). Raises PlaitError if there are no exported
    weights, no run that says how they were made, or if its own may be of an earlier step than its last."""
    from plait import Config, PlaitError
    from plait.host import RunFolder, located
    from plait_use.trained import FITS, folder_above

    path = located(word, "RUN", FITS)
    run = path if (path / "config.yaml").is_file() else folder_above(path)
    if run is None:
        raise PlaitError(f"{word} is in no run's folder, so nothing says how it was trained: name a run").at(
            "RUN", word, fits="a finished run"
        )
    weights = run / "export" if path == run else path
    if not any(weights.glob("*.safetensors")):
        raise PlaitError(
            f"{word} has no exported weights to publish: a run writes them after its last step if "
            "checkpoint.export=true, and plait convert makes them of a checkpoint"
        ).at("RUN", word, fits="a finished run, or its exported folder")
    outcome, asked = RunFolder(run).outcome(), Config.of(RunFolder(run).read_config()).checkpoint
    exported = outcome is not None and outcome.kind == "finished" and asked.enabled and asked.export
    if is_own(weights, run) and not exported:
        raise PlaitError(
            f"{word} has not exported its weights after its last step, so those in {weights} may be of an earlier one: "
            "move that folder away and let the run finish with checkpoint.export=true"
        ).at("RUN", word, fits="a finished run")
    return weights, run


def is_own(weights: Path, run: Path) -> bool:
    """Whether `weights` is the folder into which the run itself exports."""
    return weights.resolve() == (run / "export").resolve()


def _write(out: Path, files: list[Path], text: str) -> None:
    from plait import PlaitError
    from plait.host import writing

    if out.exists():
        raise PlaitError(f"--folder {out} is there already: name a new one").at("--folder", str(out))
    with writing(out):
        out.mkdir(parents=True)
        for each in files:
            shutil.copy2(each, out)
        (out / CARD).write_text(text, encoding="utf-8")


def _upload(repo: str, files: list[Path], text: str, private: bool) -> str:
    """Makes the commit; returns its address."""
    from plait import PlaitError
    from plait.host import one_line

    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise PlaitError("plait push needs the library huggingface_hub: pip install 'plait-use[hub]'") from None
    operations = [CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=text.encode())]
    operations += [CommitOperationAdd(path_in_repo=each.name, path_or_fileobj=str(each)) for each in files]
    try:
        api = HfApi()
        api.create_repo(repo, private=private or None, exist_ok=True)
        done: Any = api.create_commit(repo, operations, commit_message="Weights and model card, by plait push")
    except Exception as error:  # of the network, of rights, of a missing token
        raise PlaitError(f"{repo} cannot be published: {one_line(error)}; hf auth login sets a token") from error
    return str(done.commit_url)
