// What the parity program runs: each job on a group of its own number of ranks.
#pragma once

#include <functional>
#include <vector>

#include "parallel/communicator.h"
#include "tests/parity/report.h"

namespace onescale::parity {

struct Job {
  int ranks;
  std::function<void(Communicator&, Report&)> run;
};
using Jobs = std::vector<Job>;

// Layout, stage, reduction, bucket, micro-batches, labels, clipping, model, dtype, recompute and dropout: every two
// levels together, or, with `slow`, the whole product of what decides a gradient's path.
void add_grid(Jobs& jobs, bool slow);
void add_golden(Jobs& jobs);        // gradients of transformers, and six AdamW steps
void add_bits(Jobs& jobs);          // what is promised bit for bit
void add_odd_sizes(Jobs& jobs);     // padded vocabularies, 22 heads
void add_broken_ranks(Jobs& jobs);  // a rank that is not finite, replicas that differ
void add_long_run(Jobs& jobs);
void add_chunks(Jobs& jobs);      // more good tokens than the head takes at once
void add_wire(Jobs& jobs);        // gradients that travel in bfloat16
void add_evaluation(Jobs& jobs);  // first weights too
void add_plain(Jobs& jobs);       // the slopes of a plain float64 forward

}  // namespace onescale::parity
