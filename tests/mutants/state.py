"""Bugs of initial values, checkpoints and memory, and of what a strategy leaves behind."""

from tests.mutants.planted import Mutant

WRAP = "plait_fsdp2/wrap.py"
STATE = "plait/parallel/state.py"
END_OF_WRAP = "    if prefetch:\n"

MUTANTS = [
    Mutant(
        "shards are initialised alike on all ranks",
        "plait/parallel/initialize.py",
        "rows = held[0].tolist() if",
        "rows = list(range(len(held[0]))) if",
        "test_initial_parameters_are_bitwise_those_of_one_process",
        "initial parameters on rank",
        on={"layout": "2 shards"},
    ),
    Mutant(
        "initial values depend on the number of ranks",
        "plait/parallel/initialize.py",
        'f"{seed}/{fqn}".encode()',
        'f"{seed}/{fqn}/{torch.distributed.get_world_size()}".encode()',
        "test_initial_parameters_are_bitwise_those_of_one_process",
        "initial parameters on rank",
        on={"layout": "2 shards"},
    ),
    Mutant(
        "the names of wrappers get into the checkpoint",
        WRAP,
        END_OF_WRAP,
        "    model.register_state_dict_post_hook(lambda model, state, prefix, _: [\n"
        "        state.update({f'module.{k}': state.pop(k)}) for k in list(state)] and None)\n" + END_OF_WRAP,
        "test_checkpoint_has_the_names_of_one_process",
        "not expected ['module.",
    ),
    Mutant(
        "the optimizer's state is left out of the checkpoint",
        STATE,
        "                state |= own\n",
        "",
        "test_checkpoint_holds_the_optimizer",
        "exp_avg",
    ),
    Mutant(
        "the checkpoint holds other values than the run, and loading undoes it",
        STATE,
        'state[f"model.{fqn}"] = tensor.detach()',
        'state[f"model.{fqn}"] = -tensor.detach()',
        "test_checkpoint_holds_what_one_process_holds",
        "would save other initial parameters",
    ),
    Mutant(
        "one rank's share of the moments is lost at a save",
        STATE,
        "            own[key] = value.detach()\n",
        "            own[key] = value.detach() * (torch.distributed.get_rank() != 1)\n",
        "test_checkpoint_holds_what_one_process_holds",
        "would save other values after step 1 than it holds: ",
        strategy="zero",
    ),
    Mutant(
        "a momentum stands outside of the optimizer's state",
        "plait_zero/shards.py",
        "    optimizer = make(made)\n",
        "    optimizer = make(made)\n"
        "    optimizer.momenta = {p: torch.zeros_like(p) for group in made for p in group['params']}\n",
        "test_checkpoint_holds_the_optimizer",
        "AdamW keeps 'momenta' of its parameters elsewhere than in `state`",
        strategy="zero",
    ),
    Mutant(
        "parameters that should be sharded are silently replicated",
        "plait_fsdp2/__init__.py",
        'self.replicate, splits="batch"),\n            MeshAxis("dp_shard", self.shard,',
        'self.shard, splits="batch"),\n            MeshAxis("dp_shard", self.replicate,',
        "test_no_rank_holds_more_than_declared",
        "holds 3072 elements of 'tok_embeddings.weight', declared 1536",
        on={"layout": "2 shards"},
    ),
    Mutant(
        "tied parameters are untied when they get storage",
        "plait/parallel/initialize.py",
        "torch.__future__.set_swap_module_params_on_conversion(True)",
        "torch.__future__.set_swap_module_params_on_conversion(False)",
        "test_tied_parameters_stay_tied",
        "that should be one are several",
        strategy="ddp",
    ),
    Mutant(
        "tied parameters become two when they are divided",
        "plait/parallel/sharding.py",
        "module.register_parameter(name, made[id(old)])",
        "module.register_parameter(name, nn.Parameter(made[id(old)].detach()))",
        "test_tied_parameters_stay_tied",
        "which the model ties: they would train apart",
        strategy="tensor_parallel",
    ),
    Mutant(
        "a hook is left behind",
        WRAP,
        END_OF_WRAP,
        "    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)\n" + END_OF_WRAP,
        "test_nothing_is_left_behind",
        "global hooks of torch.nn.Module",
    ),
    Mutant(
        "torch is patched for good",
        WRAP,
        END_OF_WRAP,
        "    torch.optim.Optimizer.zero_grad = torch.optim.Adam.zero_grad = lambda *_: None\n" + END_OF_WRAP,
        "test_nothing_is_left_behind",
        "torch.optim.Optimizer.zero_grad was patched",
    ),
    Mutant(
        "a setting of torch is changed for the whole process",
        WRAP,
        END_OF_WRAP,
        '    torch.set_float32_matmul_precision("medium")\n' + END_OF_WRAP,
        "test_nothing_is_left_behind",
        "torch.get_float32_matmul_precision() was highest, is medium",
    ),
    Mutant(
        "torch's random state is seeded by rank",
        WRAP,
        END_OF_WRAP,
        "    torch.manual_seed(mesh.rank)\n" + END_OF_WRAP,
        "test_nothing_is_left_behind",
        "torch's random state",
    ),
    Mutant(
        "a process group of the strategy's own outlives the run",
        WRAP,
        END_OF_WRAP,
        "    torch.distributed.new_group()\n" + END_OF_WRAP,
        "test_nothing_is_left_behind",
        "does not belong to the mesh",
    ),
    Mutant(
        "a block is gathered once more than necessary",
        WRAP,
        '"default": not last',
        '"default": True',
        "test_collectives_are_those_declared",
        "declared: ",
        on={"layout": "2 shards", "size": "llama3"},
    ),
    Mutant(
        "a matrix that should be sharded over tensor ranks is replicated",
        "plait_tensor_parallel/degrees.py",
        '"mixer_heads", "ffn", "vocab")',
        '"mixer_heads", "vocab")',
        "test_no_rank_holds_more_than_declared",
        "holds 3072 elements of 'layers.0.feed_forward.w1.weight', declared 1536",
        strategy="tensor_parallel",
        on={"layout": "tp 2"},
    ),
    Mutant(
        "every stage counts its layers from 0 in a checkpoint",
        "plait/parallel/applied.py",
        "            state |= own\n",
        "            for number, block in enumerate(self.spec.blocks_of(part)):\n"
        "                own = {k.replace(f'.{block}.', f'.layers.{number}.'): t for k, t in own.items()}\n"
        "            state |= own\n",
        "test_checkpoint_has_the_names_of_one_process",
        "missing ['layers.",
        strategy="pipeline",
    ),
    Mutant(
        "a tied weight is saved under its last name",
        STATE,
        "names.setdefault(id(tensor), (tensor, canonical(key)))",
        "names[id(tensor)] = (tensor, canonical(key))",
        "test_checkpoint_has_the_names_of_one_process",
        "missing ['tok_embeddings.weight']",
    ),
    Mutant(
        "one worker's moments are saved for all",
        "plait/checkpoint/replicas.py",
        "sorted(apart & here.keys())",
        'sorted(key for key in apart & here.keys() if "exp_avg" not in key)',
        "test_checkpoint_holds_what_one_process_holds",
        "is not what the rule `replicas` of its strategy makes of the ranks' values",
        strategy="diloco",
    ),
    Mutant(
        "workers that are apart are saved as their mean",
        "plait/checkpoint/replicas.py",
        "result[replica.own_name(key)] = result.pop(key)",
        "result[replica.own_name(key)] = _common(result.pop(key), replica)",
        "test_checkpoint_holds_what_one_process_holds",
        "would save other values after step 1 than it holds",
        strategy="local_sgd",
    ),
    Mutant(
        "a checkpoint of every other step holds other values",
        STATE,
        "def canonical_state(\n",
        "def canonical_state(model, optimizer=None):\n"
        "    state, after = plain_state(model, optimizer)\n"
        "    kept = optimizer.state.values() if optimizer else ()\n"
        "    if any(float(each['step']) == 2 for each in kept if 'step' in each):\n"
        "        state = {key: tensor + 1 if key.startswith('model.') else tensor for key, tensor in state.items()}\n"
        "    return state, after\n\n\n"
        "def plain_state(\n",
        "test_checkpoint_holds_what_one_process_holds",
        "would save other values after step 2 than it holds",
    ),
]
