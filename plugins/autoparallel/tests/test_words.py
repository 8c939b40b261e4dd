"""A plan in words."""

from types import SimpleNamespace

from plait import MeshAxis, MeshView
from plait.contract.axes import join_axes
from plait_autoparallel import words
from plait_autoparallel.candidates import Candidate


def test_a_layout_is_told_by_its_axes_and_those_of_views_but_not_by_what_views_leave():
    shards, experts = MeshAxis("dp_shard", 4, "batch"), MeshView("experts", (MeshAxis("ep", 2),))
    layout = join_axes([("fsdp2", [MeshAxis("dp_replicate", 1, "batch"), shards]), ("expert_parallel", [experts])], 4)
    assert [axis.name for axis in layout.views["experts"] if axis.degree > 1] == ["experts.dp_shard", "ep"]
    said = words.mesh(Candidate(SimpleNamespace(layout=layout), rows=1, micro=1))
    assert [word for word in said.split() if "=" in word] == ["dp_shard=4", "ep=2"]
