"""A stranger's GPipe (Huang et al., arXiv 1811.06965) with one stage per rank, from public names alone."""

import attrs
import torch
import torch.distributed as dist

import plait
from plait import hookimpl


@attrs.define(slots=False)
class GPipe:
    """Blocks divided evenly over `degree` ranks; all forwards, then all backwards."""

    phase = "stages"
    claims = ("stages",)
    name = "gpipe"

    degree: int = 2

    @hookimpl
    def build_mesh(self):
        return [plait.MeshAxis("pp", self.degree, splits="layers")]

    @hookimpl
    def parallelize(self, model, mesh, spec):
        at, blocks = mesh["pp"].get_local_rank(), len(spec.blocks_of(model))
        ends = [blocks * i // self.degree for i in range(self.degree + 1)]
        return [plait.stage(model, spec, ends[at], ends[at + 1])]

    @hookimpl
    def forward_backward(self, parts, inputs, loss, mesh):
        at, done = mesh["pp"].get_local_rank(), []
        for i, each in enumerate(inputs):
            x = None if at == 0 else self.receive(mesh, at - 1).requires_grad_(torch.is_grad_enabled())
            result = parts[0](*each) if x is None else parts[0](*each, stream=x)
            if at < self.degree - 1:
                self.send(mesh, at + 1, result)
            done.append((x, loss(i, result) if at == self.degree - 1 else result))
        for x, result in done if torch.is_grad_enabled() else ():
            result.backward(None if at == self.degree - 1 else self.receive(mesh, at + 1))
            if x is not None:
                self.send(mesh, at - 1, x.grad)
        return True

    def send(self, mesh, to, x):
        group = mesh["pp"].get_group()
        dist.send_object_list([(x.shape, x.dtype)], dist.get_global_rank(group, to), group)
        dist.send(x.detach().contiguous(), dist.get_global_rank(group, to), group)

    def receive(self, mesh, of):
        group, like = mesh["pp"].get_group(), [None]
        dist.recv_object_list(like, dist.get_global_rank(group, of), group)
        x = torch.empty(like[0][0], dtype=like[0][1], device=mesh["pp"].device_type)
        dist.recv(x, dist.get_global_rank(group, of), group)
        return x
