"""Memory of logits, by the ranks that divide the vocabulary and by loss.chunks: python benchmarks/logits.py [--vocab N]

One step of a small Llama under tensor_parallel, in float32, on 1, 2 and 4 ranks. It counts the storage of every tensor
with a column per token of the vocabulary, or of a rank's share of it, from its creation until it is freed. The figure
is the maximum at any moment on a rank, also in units of one whole set of logits.
"""

import argparse
import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

from machine import about, run_ranks

DEGREES = (1, 2, 4)
CHUNKS = (1, 8)


def as_rank(degree: int, vocab: int, tokens: int) -> None:
    """A rank: writes peak-<rank>.json, its peaks in bytes, by loss_parallel and loss.chunks."""
    import torch
    import torch.distributed as dist
    from torch._subclasses import FakeTensor  # DTensor tries operations on them
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import plait
    from plait_models.llama3 import Llama3
    from plait_tensor_parallel import TensorParallel

    class Watch(TorchDispatchMode):
        """Counts the bytes of storages in use that belong to logits; those of the model's parameters do not count."""

        def __init__(self, parameters: list[Any]) -> None:
            super().__init__()
            self.now = self.peak = 0
            self.known = {self.key(p.to_local() if hasattr(p, "to_local") else p) for p in parameters}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(t.__name__ == "DTensor" for t in types):
                return NotImplemented  # seen again, with what this rank has
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.dim() and not isinstance(tensor, FakeTensor):
                    self.see(tensor)
            return result

        def key(self, tensor: Any) -> int:
            return tensor.untyped_storage()._cdata

        def see(self, tensor: Any) -> None:
            rows = tensor.numel() // tensor.shape[-1] if tensor.shape[-1] else 0
            sizes = tensor.shape[-1] in (vocab, vocab // degree) and rows in {tokens // n for n in CHUNKS}
            if not sizes or self.key(tensor) in self.known:
                return
            storage, key = tensor.untyped_storage(), self.key(tensor)
            size = storage.nbytes()
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)

            def freed() -> None:
                self.known.discard(key)
                self.now -= size

            weakref.finalize(storage, freed)

    def peak(loss_parallel: bool, chunks: int) -> int:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Llama3(
                dim=64, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=vocab, max_seq_len=tokens
            )
        strategy = TensorParallel(degree=degree, loss_parallel=loss_parallel)
        applied = plait.apply(model, model.spec(), [strategy], loss=plait.Loss(chunks), seq_len=tokens)
        ids = torch.randint(0, vocab, (1, tokens + 1), device=applied.device)
        watch = Watch(applied.parameters())
        with watch:
            applied.forward_backward([plait.Batch(ids[:, :-1], ids[:, 1:])], tokens)
        return watch.peak

    peaks = {f"{switch} | {n}": peak(switch == "on", n) for switch in ("off", "on") for n in CHUNKS}
    Path(f"peak-{dist.get_rank()}.json").write_text(json.dumps(peaks), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128_256, help="columns of the logits (default: Llama 3's)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the batch")
    parser.add_argument("--degrees", type=int, nargs="+", default=DEGREES, help="numbers of ranks")
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_rank:
        return as_rank(asked.as_rank, asked.vocab, asked.tokens)
    whole = asked.vocab * asked.tokens * 4
    print(f"{about()}\n{asked.tokens} tokens x {asked.vocab} float32 logits: {whole / 2**20:,.1f} MiB\n")
    print("| ranks | loss_parallel | loss.chunks | peak per rank, MiB | in sets of logits |\n|---|---|---|---|---|")
    for degree in asked.degrees:
        with tempfile.TemporaryDirectory(prefix="plait-logits-") as scratch:
            sizes = (f"--vocab={asked.vocab}", f"--tokens={asked.tokens}")
            run_ranks(degree, __file__, *sizes, "--as-rank", str(degree), cwd=scratch)
            ranks = [
                json.loads(Path(scratch, f"peak-{rank}.json").read_text(encoding="utf-8")) for rank in range(degree)
            ]
        for way in ranks[0]:
            peak = max(rank[way] for rank in ranks)
            print(f"| {degree} | {way} | {peak / 2**20:,.1f} | {peak / whole:.3f} |", flush=True)


if __name__ == "__main__":
    main()
