"""`plait sample`: what a trained model writes."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.host import Checked, Parser

TOKENS = 200  # of a text at most
YEAR = 366 * 24 * 60 * 60.0  # seconds that ranks wait for somebody who types

help = "write on from a prompt, or talk, with a trained model"


def arguments(parser: "Parser") -> None:
    from plait.host import whole
    from plait_use.words import number

    parser.description = """\
Prints what the model of RUN writes after each PROMPT, as it comes. RUN is a run or its name, a checkpoint, such as
runs/NAME/checkpoints/best, an exported folder, or a folder of Hugging Face's. Without a PROMPT it reads prompts from
the terminal, or one prompt from standard input. The model runs on the ranks and in the layout of its run; what looks
like key=value is an override as for `plait train`, such as launch.nproc_per_node=1 'strategy=[]'.
The same seed draws the same text in every layout."""
    parser.add_argument("run", metavar="RUN", help="what is sampled from")
    parser.add_argument("words", metavar="PROMPT", nargs="*", default=[], help="texts to write on from; overrides")
    parser.add_argument("--chat", action="store_true", help="prompts are messages, put into the chat template")
    parser.add_value("tokens", "N", whole("tokens", "a number of at least 1", 1), f"at most (default: {TOKENS})")
    help_ = "0: always the most likely token; 1: as the model says (default: 1)"
    parser.add_value("temperature", "X", number("temperature", "a number of at least 0", 0), help_)
    help_ = "draw from the K most likely tokens (default: all)"
    parser.add_value("top_k", "K", whole("top_k", "a number of at least 1", 1), help_)
    help_ = "draw from the most likely tokens that have this probability together (default: 1)"
    parser.add_value("top_p", "P", number("top_p", "a number above 0, up to 1", 1e-9, 1), help_)
    parser.add_value("seed", "N", whole("seed", "a whole number"), "of the draws (default: 0)")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configuration of your own")


def run(args: "Namespace") -> int:
    from plait.host import on_ranks, overrides_of
    from plait_use.trained import find
    from plait_use.words import divided

    texts, overrides = divided(args.words)
    trained = find(args.run, overrides_of(args, overrides))
    typed = not texts and sys.stdin.isatty()
    if not texts and not typed:
        texts = [sys.stdin.read().removesuffix("\n")]
    config = trained.for_logits
    if typed:
        config = config.with_value("launch.timeout_seconds", YEAR)
    asked = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    draw = {key: value for key, value in asked.items() if value is not None}

    def given(checked: "Checked") -> Mapping[str, Any]:
        from plait_use.writing import Prompts

        checkpoint = trained.writes(checked)
        prompts = Prompts(checked.source, config.train.seq_len, args.chat)
        for text in texts:
            prompts.ids(text)  # refuses
        print(f"model: {trained}", file=sys.stderr, flush=True)
        return {
            "checkpoint": checkpoint,
            "texts": None if typed else texts,
            "chat": args.chat,
            "tokens": args.tokens or TOKENS,
            "draw": draw,
        }

    on_ranks(config, "plait_use.writing:write", given)
    return 0
