"""Bugs of norms and losses: counted twice, left out, or those of one rank."""

from tests.mutants.planted import Mutant

DIVIDED = "plait/parallel/divided_layers.py"

MUTANTS = [
    Mutant(
        "the norm of the gradients is taken over one rank's shards only",
        "plait/parallel/clip.py",
        "[_norm(group, norm_type) for group",
        "[_norm([getattr(g, '_local_tensor', g) for g in group], norm_type) for group",
        "test_gradient_norms_equal_one_process",
        "the norm of the gradients of step",
        on={"layout": "2 shards"},
    ),
    Mutant(
        "the validation loss is averaged per rank",
        "plait/train/validation.py",
        "    dist.all_reduce(sums)\n    return {",
        "    dist.all_reduce(sums := sums / sums[:, 1:])\n    sums /= dist.get_world_size()\n    return {",
        "test_a_run_equals_one_process",
        "val_loss is off",
    ),
    Mutant(
        "the loss is divided by the rank's own count of tokens",
        "plait/train/trainer.py",
        "return max(tokens, 1)",
        "return max(dealt.valid() * dist.get_world_size(), 1)",
        "test_a_run_equals_one_process",
        "loss is off",
    ),
    Mutant(
        "the norm of the gradients is that of a rank's stages",
        DIVIDED,
        "over_stages(wide**norm_type, mesh) ** (1 / norm_type)",
        "wide",
        "test_gradient_norms_equal_one_process",
        "the norm of the gradients of step",
        strategy="pipeline",
        on={"layout": "gpipe pp 2"},
    ),
    Mutant(
        "the loss of a step stays on the last stage",
        "plait/parallel/applied.py",
        "            over_stages(total, self.mesh)\n",
        "            assert over_stages\n",
        "test_losses_of_20_steps_equal_one_process",
        "the loss of step 1 is off",
        strategy="pipeline",
        on={"layout": "gpipe pp 2"},
    ),
    Mutant(
        "the norm of the gradients leaves experts out",
        "plait/parallel/clip.py",
        "for group in groups.values()] or",
        "for group in list(groups.values())[:1]] or",
        "test_gradient_norms_equal_one_process",
        "the norm of the gradients of step",
        strategy="expert_parallel",
        on={"layout": "fsdp2 2 x ep 2"},
    ),
    Mutant(
        "a weight that all tensor ranks have counts once per rank in the norm",
        "plait/parallel/clip.py",
        "return norm.full_tensor() if isinstance(norm, DTensor) else norm",
        "if not isinstance(norm, DTensor):\n        return norm\n"
        "    same = all(place.is_replicate() for place in norm.placements)\n"
        "    return norm.full_tensor() * (norm.device_mesh.size() ** 0.5 if same else 1)",
        "test_gradient_norms_equal_one_process",
        "the norm of the gradients of step",
        strategy="tensor_parallel",
        on={"layout": "tp 2"},
    ),
    Mutant(
        "the norm of the gradients is summed over the stages twice",
        DIVIDED,
        "return (over_stages(wide**norm_type, mesh)",
        "return (over_stages(over_stages(wide**norm_type, mesh), mesh)",
        "test_gradient_norms_equal_one_process",
        "the norm of the gradients of step",
        strategy="pipeline",
        on={"layout": "gpipe pp 2"},
    ),
    Mutant(
        "each rank clips by the norm of its own shards",
        "plait/parallel/clip.py",
        "clip_grads_with_norm_(local, max_norm, total,",
        "clip_grads_with_norm_(local, max_norm, get_total_norm(grads),",
        "test_clipping_scales_every_gradient_alike",
        "was not scaled by max_norm / norm",
    ),
]
