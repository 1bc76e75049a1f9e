// What the commands share: the device, the model's sizes, and where weights come from.
#pragma once

#include <sched.h>

#include <functional>
#include <memory>
#include <optional>

#include "data/tokenizer.h"
#include "parallel/launch.h"
#include "train/checkpoint.h"
#include "train/options.h"
#include "train/step.h"

namespace onescale {

// The CPUs that a rank may use.
struct Place {
  char host[256];
  cpu_set_t cpus;
  static Place here();
  std::string_view host_name() const { return host; }
};

// What a rank's device measured with this many threads; and what all can do together: a core that several ranks share
// does its work once, and threads beyond a rank's CPUs add nothing. FLOP/s.
struct RankPeak {
  Place place;
  std::int64_t threads;
  double flops;
};
double combined_peak(const std::vector<RankPeak>& ranks);

// The options of one of several ranks: threads 0 becomes its share of the CPUs that ranks of this machine have
// together. Collective.
Options of_rank(Options options, Communicator& world);

// Says that ranks on rank 0's machine are bound to fewer CPUs than their mpirun may use, and how not to; empty where
// they are not. Collective.
std::string idle_cpus(const Options& options, const Launch& launch, Communicator& world);

// The options' layout of this rank of `world`. Throws UsageError where sp * tp does not divide its ranks.
Layout layout_of(const Options& options, const Communicator& world);

// What must be the same on all ranks: the program's version and a hash of its file, and the options.
std::string identity(const Options& options);

// The device that --device and --threads name. Throws UsageError for one that this build does not have.
std::unique_ptr<Device> make_device(const Options& options, bool dry);

DType parse_dtype(const std::string& name);

// The sizes given as options; vocab_size 0 is replaced by `tokenizer_size`.
ModelConfig config_from_options(const Options& options, std::int64_t tokenizer_size);
StepSettings step_settings(const Options& options, std::int64_t seq_len);

// The tokenizer.model of a directory; empty when there is none.
std::optional<Tokenizer> tokenizer_in(const std::string& dir);

// A directory with weights: a Hugging Face model, a checkpoint of ours, or a run directory, which means its newest
// whole checkpoint.
class ModelSource {
 public:
  // Prints a line on standard error for what is read in another way than its author may have meant.
  explicit ModelSource(const std::string& path);
  const std::string& dir() const { return dir_; }
  const ModelConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }
  void read(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const;
  FetchRange fetch() const {
    return [this](std::size_t i, std::int64_t first, std::int64_t count, float* out) { read(i, first, count, out); };
  }
  std::optional<Tokenizer> tokenizer() const { return tokenizer_in(dir_); }

 private:
  std::string dir_;
  ModelConfig config_;
  ParameterTable table_;
  std::unique_ptr<ModelReader> reader_;
};

// Rows of token ids and labels [rows, seq_len], already shifted.
struct HostBatch {
  std::int64_t rows = 0, seq_len = 0;
  std::vector<std::int32_t> ids, labels;
  HostRows of_rank(const Layout& layout) const {
    const std::int64_t share = rows / layout.dp, first = layout.dp_rank() * share * seq_len;
    return {ids.data() + first, labels.data() + first, share};
  }
};
// Those of a file. UsageError where they are longer than the model's n_positions, Error where an id is none of its
// vocabulary.
HostBatch read_batch(const std::string& path, const ModelConfig& config);

// A device with the scratch that `work` needs, found by running it for this layout on a dry one first; `memory`, when
// given, receives that one's memory_table.
std::unique_ptr<Device> planned_device(const Options& options, const Layout& layout,
                                       const std::function<void(Device&, Mesh&)>& work, std::string* memory = nullptr);

// A table of a device's memory by kind, one line a kind and the total.
std::string memory_table(const Device& device);
std::string bytes_text(double bytes);  // "1.23 GiB"

// FLOPs of training per token: 6 N, with N all parameters but the position table (the tied table once, as the head),
// and with the causal half of attention added, 6 * n_layer * n_embd * seq_len.
struct FlopsPerToken {
  double parameters, with_attention;
};
FlopsPerToken flops_per_token(const ModelConfig& config, std::int64_t seq_len);

}  // namespace onescale
