"""Whether a checkpoint, or weights, are those of a checked run's model; before any rank starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint.store import Manifest, Store
from plait.contract.errors import PlaitError
from plait.system.disk import reading

if TYPE_CHECKING:
    from plait.check.checked import Checked


def check_trained(checked: "Checked", checkpoint: Path | None) -> None:
    """Raises PlaitError unless the model of `checked` can be loaded from `checkpoint`, or from
    `checkpoint.init_from` if that is None. Reads no tensors of a checkpoint."""
    if checkpoint is None:
        if start := checked.config.checkpoint.init_from:
            check_start(start, checked)
        return
    if problem := Store.quick_problem(checkpoint):
        raise PlaitError(f"the checkpoint {checkpoint} cannot be loaded: {problem}")
    check_checkpoint(Store.read(checkpoint), checked)


def check_checkpoint(manifest: Manifest, checked: "Checked") -> None:
    """Raises PlaitError unless the checkpoint is of the run's model and its number of replicas; also for the weights
    beside which it was trained."""
    # Which parameters do not train, the ranks know: each strategy may freeze some.
    absent = checked.shapes.keys() - manifest.parameters.keys() if manifest.data.get("frozen") else ()
    Store.check_model(manifest, {fqn: shape for fqn, shape in checked.shapes.items() if fqn not in absent})
    start = checked.config.checkpoint.init_from
    if absent and start:
        check_start(start, checked)
    Store.check_replicas(manifest, {axis.name: axis.degree for axis in checked.layout.dense if not axis.sums})


def check_start(path: str, checked: "Checked") -> None:
    """Raises PlaitError unless `path` holds the model, without what strategies added to it."""
    from plait.checkpoint.init_from import check_weights
    from plait.parallel.state import integers

    added = checked.assembly.run.added
    own = {fqn: shape for fqn, shape in checked.shapes.items() if fqn not in added}
    with reading(path, "checkpoint.init_from"):
        check_weights(path, own, checked.ties, checked.parts, integers(checked.assembly.model))
