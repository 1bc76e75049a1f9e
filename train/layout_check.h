// Whether a model, its rows and its batches fit a layout of ranks: refused before anything is allocated.
#pragma once

#include <string>

#include "model/config.h"
#include "parallel/layout.h"

namespace onescale {

// Throws UsageError, naming the values that are allowed, where tp does not divide n_head and n_inner, where sp_mode is
// "ulysses" and sp * tp does not divide n_head, or where seq_len is no multiple of sp ("gather_kv": of 2 * sp, any
// number of heads). vocab_size may be any: its last shard is padded. make_layout has checked the world.
void check_layout(const ModelConfig& config, std::int64_t seq_len, const Layout& layout, const std::string& sp_mode);

// Throws UsageError, naming what is allowed, where dp does not divide global_batch, or micro_batch not a dp rank's
// rows.
void check_batch(std::int64_t global_batch, std::int64_t micro_batch, const Layout& layout);

}  // namespace onescale
