"""What training says of epochs at its start."""

from plait.data.ahead import Ahead
from plait.records.text import counted


def said_of_epochs(batches: Ahead, samples: int, step: int, steps: int) -> str:
    """The length of an epoch in steps, and the number of epochs in the whole run, of each source of a mixture too, in
    one line; "" if no length is known. samples: what the run has taken in `step` of its `steps`."""
    whole, size = batches.passes(batches.after(samples, steps - step)), batches.global_batch_size
    epoch = f"an epoch is {counted(batches.epoch / size, 'step')}; " if batches.epoch else ""
    passes = [
        counted(count, "epoch") + f" of {name.removeprefix('epoch/')}" * (name != "epoch")
        for name, count in whole.items()
    ]
    few = ""
    if batches.epoch and batches.epoch < size:
        few = f"; a step takes {size} samples, of {batches.epoch}: a smaller train.global_batch_size makes more steps"
        few += "" if batches.texts else ", and a smaller train.seq_len more samples"  # else each text is a sample
    are = "is" if steps == 1 else "are"
    return f"data: {epoch}{counted(steps, 'step')} {are} {', '.join(passes)}{few}" if passes else ""
