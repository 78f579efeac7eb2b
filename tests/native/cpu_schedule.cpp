#include "cpu/schedule.h"

#include "native.h"

namespace fastcaps::native {

Fields cpu_schedule(bool backward, const Numbers& sizes, const Fields& facts) {
  static const float there = 0;
  const auto fact = [&](const char* name) { return facts.at(name); };
  Votes votes = votes_of(sizes.data(), Storage(fact("storage")));
  votes.weight = sizes[10] > 0 ? &there : nullptr;
  votes.bias = fact("bias") ? &there : nullptr;
  votes.bias_stride_i = fact("bias") == 2 ? votes.parents_size() : 0;
  Task task(votes, fact("folds"), fact("lanes"), {fact("state"), fact("results")}, fact("iterations"));
  task.copied = fact("copied");
  const Schedule made = backward ? schedule_backward(votes, task) : schedule_forward(votes, task);
  return {{"row_groups", made.row_groups},
          {"samples", made.samples},
          {"ranges", made.ranges},
          {"rows_per_group", made.rows_per_group},
          {"block_children", made.block_children},
          {"block_rows", made.block_rows},
          {"weight_parts", made.weight_parts},
          {"child_lanes", made.child_lanes},
          {"shared_weights", made.shared_weights},
          {"keep_votes", made.keep_votes},
          {"stay", made.stay},
          {"folded", made.folded},
          {"items", made.items()},
          {"rows", made.rows()},
          {"may_share", task.shared},
          {"may_fold", task.folded}};
}

}  // namespace fastcaps::native
