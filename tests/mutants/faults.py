"""Faults in mathematics, sampling, resuming, data and plan, each with the test that finds it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: `old` stands once in the files of `room`, and becomes `new`."""

    name: str
    room: str  # a folder or a file
    old: str
    new: str
    test: str  # FILE::FUNCTION, all cases of it


MATHS = "rlhf/objectives"
MUTANTS = (
    # -- mathematics ---------------------------------------------------------------------------------------------------
    Mutant(
        "the advantage's sign",
        MATHS,
        "return -masked_mean(objective, mask), clipping",
        "return masked_mean(objective, mask), clipping",
        "tests/oracle/test_losses.py::test_policy_loss_by_hand",
    ),
    Mutant(
        "clipped by the other bound",
        MATHS,
        "ratio.clamp(1 - low, 1 + high)",
        "ratio.clamp(1 - high, 1 + low)",
        "tests/oracle/test_group_losses.py::test_a_clipped_token_worked_by_hand",
    ),
    Mutant(
        "values go on after the end of a response",
        MATHS,
        "zero_pads(rewards, mask), zero_pads(values, mask)",
        "zero_pads(rewards, mask), values",
        "tests/oracle/test_gae.py::test_garbage_in_pads_changes_nothing",
    ),
    Mutant(
        "gae without lambda",
        MATHS,
        "delta + gamma * lam * next_advantage",
        "delta + gamma * next_advantage",
        "tests/oracle/test_gae.py::test_against_the_double_sum",
    ),
    Mutant(
        "whitened advantages keep their mean",
        MATHS,
        "(zero_pads(x, mask) - mean) * scale",
        "zero_pads(x, mask) * scale",
        "tests/oracle/test_masked.py::test_whitened_mean_and_deviation",
    ),
    Mutant(
        "padding counts in a mean",
        MATHS,
        "zero_pads(x, mask).sum(dim) / mask.sum(dim).clamp(min=1)",
        "zero_pads(x, mask).sum(dim) / torch.ones_like(mask).sum(dim).clamp(min=1)",
        "tests/oracle/test_masked.py::test_padding_side_and_amount_are_irrelevant",
    ),
    Mutant(
        "the KL's sign",
        MATHS,
        "return -d\n",
        "return d\n",
        "tests/oracle/test_kl.py::test_estimators_of_one_token_worked_by_hand",
    ),
    Mutant(
        "the KL is rewarded",
        MATHS,
        "-kl_coef * zero_pads(kl, mask)",
        "kl_coef * zero_pads(kl, mask)",
        "tests/oracle/test_reward_shaping.py::test_against_a_loop",
    ),
    Mutant(
        "a group's mean over the other prompts",
        MATHS,
        "at_least_float32(rewards) - mean, rewards",
        "at_least_float32(rewards) - masked_mean(rewards, judged, dim=0), rewards",
        "tests/oracle/test_group_losses.py::test_advantages_are_those_of_loops",
    ),
    Mutant(
        "leave-one-out counts the response itself",
        MATHS,
        "(judged.sum(1, keepdim=True) - 1).clamp(min=1)",
        "judged.sum(1, keepdim=True).clamp(min=1)",
        "tests/oracle/test_group_losses.py::test_advantages_worked_by_hand",
    ),
    Mutant(
        "the margin's sign",
        "rlhf/stages/rm.py",
        "margin_ranking_loss(chosen, rejected,",
        "margin_ranking_loss(rejected, chosen,",
        "tests/invariants/test_stages.py::test_the_margin_ranking_loss_is_the_hinge_and_trains",
    ),
    # -- stages --------------------------------------------------------------------------------------------------------
    Mutant(
        "a mean of micro-batches' means",
        "rlhf/stages/ppo.py",
        "share = micro.mask.sum() / tokens\n        with torch.set_grad_enabled(self.policy_learns):",
        "share = torch.tensor(len(micro.mask) * self.options.num_mini_batches / self.options.batch_size)\n"
        "        with torch.set_grad_enabled(self.policy_learns):",
        "tests/invariants/test_ppo.py::test_the_micro_batch_decides_memory_and_not_the_result",
    ),
    Mutant(
        "the reference is the policy",
        "rlhf/stages/ppo.py",
        'role_passes.logprobs(shared, "reference", rollout, options)',
        'role_passes.logprobs(shared, "policy", rollout, options)',
        "tests/oracle/test_ppo_step.py::test_a_step_is_what_the_paper_writes",
    ),
    Mutant(
        "scores of responses in another order",
        "rlhf/stages/online/session.py",
        "[self.train[i] for i in self.prompts_of(step) for _ in range(self.options.samples_per_prompt)]",
        "[self.train[i] for _ in range(self.options.samples_per_prompt) for i in self.prompts_of(step)]",
        "tests/invariants/test_group_scores.py::test_responses_are_scored_row_by_row",
    ),
    Mutant(
        "a response that ends loses the penalty",
        "rlhf/stages/online/scores.py",
        "(options.missing_eos_penalty or 0.0) * ~rollout.ended",
        "(options.missing_eos_penalty or 0.0) * rollout.ended",
        "tests/invariants/test_group_scores.py::test_responses_are_scored_row_by_row",
    ),
    Mutant(
        "the reference of KTO's z answers the same prompt",
        "rlhf/stages/kto.py",
        "for judged in others if judged.prompt != row.prompt",
        "for judged in others if judged.response != row.response",
        "tests/oracle/test_kto.py::test_z_is_estimated_from_answers_to_other_prompts",
    ),
    Mutant(
        "DPO learns the rejected answer",
        "rlhf/stages/dpo.py",
        '"chosen_ids": chosen.response, "rejected_ids": rejected.response',
        '"chosen_ids": rejected.response, "rejected_ids": chosen.response',
        "tests/invariants/test_stages.py::test_of_a_pair_the_chosen_answer_is_the_one_that_is_learned",
    ),
    Mutant(
        "a reward model learns the rejected answer",
        "rlhf/stages/rm.py",
        "(side.prompt + side.response for side in pair)",
        "(side.prompt + side.response for side in pair[::-1])",
        "tests/invariants/test_stages.py::test_of_a_pair_the_chosen_answer_is_the_one_that_is_learned",
    ),
    Mutant(
        "rewards of answers without the reference",
        "rlhf/stages",
        'return logprobs("policy") - logprobs("reference")',
        'return logprobs("policy")',
        "tests/invariants/test_stages.py::test_an_answer_s_log_ratio_is_that_to_the_reference",
    ),
    # -- models and sampling -------------------------------------------------------------------------------------------
    Mutant(
        "a mask shifted by one",
        "rlhf",
        "device=self.ids.device) < self.response_length[:, None]",
        "device=self.ids.device) <= self.response_length[:, None]",
        "tests/unit/test_batch.py::test_tokens_and_their_predictors_follow_the_prompt_of_each_row",
    ),
    Mutant(
        "log-probabilities of the token before",
        "rlhf",
        "return self._positions() - 1",
        "return self._positions()",
        "tests/unit/test_batch.py::test_tokens_and_their_predictors_follow_the_prompt_of_each_row",
    ),
    Mutant(
        "log-probabilities without the temperature",
        "rlhf/models",
        "temperature / logit_scale(base.config)",
        "1.0 / logit_scale(base.config)",
        "tests/oracle/test_ppo_step.py::test_a_step_is_what_the_paper_writes",
    ),
    Mutant(
        "an adapter without its scale",
        "rlhf/models/lean",
        "weight, b, a, alpha=part.scaling, out=rows)",
        "weight, b, a, out=rows)",
        "tests/unit/test_trunk.py::test_values_and_gradients_are_those_of_peft_but_for_the_order_of_sums",
    ),
    Mutant(
        "the token that reaches top_p is not drawn",
        "rlhf/rollout",
        "ordered.masked_fill(likelier >= top_p, -torch.inf)",
        "ordered.masked_fill(reached >= top_p, -torch.inf)",
        "tests/oracle/test_top_p.py::test_the_likeliest_tokens_that_reach_top_p_are_drawn_in_proportion",
    ),
    Mutant(
        "a batch of prompts draws the numbers of the first",
        "rlhf/rollout",
        "uniforms[rows], sampling, tokenizer",
        "uniforms[: len(rows)], sampling, tokenizer",
        "tests/invariants/test_rollout.py::test_a_response_does_not_depend_on_its_neighbours",
    ),
    # -- resuming ------------------------------------------------------------------------------------------------------
    Mutant(
        "a seed that is not restored",
        "rlhf/models/random_state.py",
        '    torch.set_rng_state(state["torch"])\n',
        "",
        "tests/e2e/test_chain.py::test_resuming_after_a_crash_gives_the_same_bytes",
    ),
    Mutant(
        "an optimizer's state that is not restored",
        "rlhf/stages",
        '        self.optimizer.load_state_dict(saved["optimizer"])\n',
        "",
        "tests/invariants/test_ppo.py::test_a_checkpoint_holds_everything_the_next_step_depends_on",
    ),
    Mutant(
        "every epoch has the order of the first",
        "rlhf/stages",
        "manual_seed(seed + epoch)",
        "manual_seed(seed)",
        "tests/invariants/test_ppo.py::test_every_prompt_is_used_once_per_epoch_and_the_order_is_a_function_of_seed_and_step",
    ),
    Mutant(
        "the order of rows is another one after a resume",
        "rlhf/stages",
        'rng = random.Random(f"{self.seed}:{self.epoch}")',
        'rng = random.Random(f"{self.seed}:{self.epoch}:{id(self)}")',
        "tests/e2e/test_later_epochs.py::test_resumed_inside_the_second_epoch",
    ),
    # -- data and plan -------------------------------------------------------------------------------------------------
    Mutant(
        "a prompt without BOS is cut at its end",
        "rlhf/data",
        "return ids[-length:]",
        "return ids[:length]",
        "tests/unit/test_tokenize.py::test_of_a_prompt_that_is_cut_its_last_tokens_stay",
    ),
    Mutant(
        "EOS is not trained",
        "rlhf/data",
        "[*response[:end], self.eos_id][:room]",
        "response[:end][:room]",
        "tests/unit/test_tokenize.py::test_a_sequence_is_bos_prompt_response_eos",
    ),
    Mutant(
        "turns of one conversation are on both sides of a split",
        "rlhf/data",
        'for message in prompt:\n        if message.role == "user" and',
        'for message in reversed(prompt):\n        if message.role == "user" and',
        "tests/unit/test_split.py::test_no_prompt_and_no_conversation_is_on_both_sides",
    ),
    Mutant(
        "a peak without the optimizer's states",
        "rlhf/plan",
        "REHEARSED_STEPS = 2 ",
        "REHEARSED_STEPS = 1 ",
        "tests/invariants/test_pinned_peaks.py::test_no_number_of_a_recipe_has_changed",
    ),
)
