"""Bugs of what training runs use beside strategies: states in 8 bits, schedule-free weights, ramps, skipped steps. Each
fails a test that is not slow."""

import attrs


@attrs.frozen
class Bug:
    """One small change, and the test that must fail because of it.

    file: below one of the source folders. old, new: the change; `old` stands there once. test: pytest's name of it.
    says: part of what it prints then.
    """

    bug: str
    file: str
    old: str
    new: str
    test: str
    says: str = "AssertionError"


EIGHT, ROUNDING = "tests/numerics/test_eight_bits.py::", "tests/numerics/test_rounding.py::"
FREE, RAMP, SKIP = (
    "plugins/muon/tests/test_schedule_free.py::",
    "tests/train/test_ramp.py::",
    "tests/train/test_skip.py::",
)

BUGS = [
    Bug(
        "the scale of a row is that of a rank's part of it",
        "plait/train/eight_bits.py",
        "        dist.all_reduce(ends_R2, dist.ReduceOp.MAX, group=group)",
        "        pass",
        f"{EIGHT}test_shards_of_rows_and_of_columns_have_the_codes_of_the_whole[1]",
    ),
    Bug(
        "a second moment becomes zero, and a step is divided by it",
        "plait/train/eight_bits.py",
        "codes_RC.clamp(min=1)",
        "codes_RC",
        f"{EIGHT}test_a_value_is_off_by_an_eighth_at_most[True]",
        "a step divides by its root",
    ),
    Bug(
        "values in 8 bits are rounded down",
        "plait/train/eight_bits.py",
        " + (random_RC & DIGITS).int()",
        "",
        f"{EIGHT}test_the_mean_is_right_and_what_does_not_change_keeps_its_code",
    ),
    Bug(
        "a state that is not finite becomes a number",
        "plait/train/eight_bits.py",
        ".nan_to_num(torch.inf, torch.inf)",
        ".nan_to_num(0.0, 0.0)",
        f"{EIGHT}test_what_is_not_finite_is_not_hidden",
    ),
    Bug(
        "a rank draws the digits that round its shard by its own places",
        "plait/train/rounding.py",
        "[held_indices(value, dim).to(local(value).device) for dim in range(value.dim())]",
        "[torch.arange(size) for size in local(value).shape]",
        f"{ROUNDING}test_a_shard_a_piece_and_a_name_have_digits_of_their_own",
    ),
    Bug(
        "all parameters are rounded by the same digits",
        "plait/train/rounding.py",
        "{self.step}/{name}/{key}",
        "{self.step}/{key}",
        f"{ROUNDING}test_a_shard_a_piece_and_a_name_have_digits_of_their_own",
    ),
    Bug(
        "parameters in bfloat16 are rounded to the nearest, so small steps are lost",
        "plait/train/rounding.py",
        "(random & 0xFFFF).int()",
        "0x8000",
        f"{ROUNDING}test_small_steps_add_up",
    ),
    Bug(
        "the mean of schedule-free weighs all steps alike, also those of the warm-up",
        "plait_muon/schedule_free.py",
        'state["weights"] += lr**2',
        'state["weights"] += 0.1**2',
        f"{FREE}test_it_takes_the_steps_of_the_paper",
    ),
    Bug(
        "schedule-free decays the mean, not where gradients are taken",
        "plait_muon/schedule_free.py",
        ".add_(decayed, alpha",
        ".add_(x, alpha",
        f"{FREE}test_it_takes_the_steps_of_the_paper",
    ),
    Bug(
        "a skipped step leaves schedule-free's weights where gradients were taken",
        "plait/parallel/applied.py",
        '            getattr(optimizer, "undo", bool)()\n',
        "",
        f"{FREE}test_a_skipped_step_leaves_the_weights[fsdp2]",
    ),
    Bug(
        "steps after a resume begin a ramp's stage at its border, not at the sample where it began",
        "plait/data/ramp.py",
        "samples + taken * shape.samples, steps - taken",
        "(until if taken else samples), steps - taken",
        f"{RAMP}test_shapes_follow_the_samples",
    ),
    Bug(
        "a step across a ramp's border has the next stage's shape",
        "plait/data/ramp.py",
        "if samples < until)",
        "if samples + shape.samples <= until)",
        f"{RAMP}test_shapes_follow_the_samples",
    ),
    Bug(
        "rows that are cut from samples get other samples' sources",
        "plait/data/ramp.py",
        "repeat_interleave(pieces)",
        "repeat(pieces)",
        f"{RAMP}test_a_cut_batch_has_the_same_tokens_in_order",
    ),
    Bug(
        "each rank decides by its own norm whether a step is skipped",
        "plait/train/skip.py",
        "            dist.all_reduce(worst, dist.ReduceOp.MAX)",
        "            pass",
        f"{SKIP}test_all_ranks_skip_alike",
    ),
    Bug(
        "a spike is forgotten, so that a norm that stays high is skipped for ever",
        "plait/train/skip.py",
        "        if math.isfinite(value):\n",
        "        if not skipped:\n",
        f"{SKIP}test_what_is_skipped",
    ),
    Bug(
        "a resumed run does not know the norms of before, so that it skips other steps",
        "plait/train/skip.py",
        'return {"norms": self.norms, "counts": self.counts}',
        'return {"counts": self.counts}',
        f"{SKIP}test_a_resumed_run_skips_and_rounds_as_it_would_have[8bit]",
    ),
]
