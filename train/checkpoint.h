// Checkpoints: RUN/checkpoints/step-00000100 is a Hugging Face directory that transformers loads, with
// optimizer*.safetensors (exp_avg.NAME, exp_avg_sq.NAME), tokenizer.model and trainer.json beside it. trainer.json is
// written last and holds the size and checksum of everything else: a directory without a valid one is no checkpoint.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"
#include "model/hf_files.h"
#include "model/parameters.h"

namespace onescale {

struct TrainerState {
  std::int64_t step = 0;         // steps done
  std::int64_t updates = 0;      // weight updates done: Adam's count
  std::int64_t samples = 0;      // position in the data: rows consumed
  std::int64_t tokens_seen = 0;  // good tokens
  std::int64_t bad_steps = 0;    // non-finite steps in a row, up to now
  std::int64_t skipped_steps = 0, clipped_steps = 0;
  double seconds = 0;  // of training so far
  std::uint64_t seed = 0;
  std::string data_hash;  // of the training data, so that a resume notices other data under the same name
  std::vector<std::pair<std::string, std::string>>
      options;  // flat names and values of the run, to list what a resume changes
};

struct CheckpointContents {
  TrainerState state;
  ModelConfig config;
  const ParameterTable& table;
  Gather weights;              // whole logical tensors, by position in the table
  Gather exp_avg, exp_avg_sq;  // both empty for SGD
  std::string tokenizer;       // bytes of tokenizer.model; empty for none
};

// Writes the checkpoint and returns its path. Free space is checked first; everything goes to a temporary sibling that
// is synced and then renamed, so that a kill at any moment leaves the older checkpoints and at most a stale temporary,
// which the next save removes. Each rank of the world writes its own files, rank 0 trainer.json last, when all have
// succeeded. On a failure of any rank the temporary is removed and every rank throws Error. An existing directory
// of the same step is replaced.
std::string save_checkpoint(const std::string& run_dir, const CheckpointContents& contents, Communicator& world);

// Removes checkpoints of steps before `step`, just saved, except the newest keep_last (counting that of `step`) and
// those whose step is a multiple of keep_every (0: none). Later steps, left by a run that was taken back, stay. Returns
// a sentence for each that could not be removed.
std::vector<std::string> prune_checkpoints(const std::string& run_dir, std::int64_t step, std::int64_t keep_last,
                                           std::int64_t keep_every);

// Reading one checkpoint. The constructor checks trainer.json and the size of every file, verify() the checksums; both
// throw DamagedFile, naming file and tensor, where the contents are wrong.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const TrainerState& state() const { return state_; }
  const ModelConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }
  bool has_moments() const { return moments_.has_value(); }

  // Every `parts`-th tensor from `part` on, so that ranks can share the work.
  void verify(std::int64_t part = 0, std::int64_t parts = 1) const;

  // Elements [first, first + count) of a parameter, or of its moments.
  void read_weights(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const;
  void read_exp_avg(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const;
  void read_exp_avg_sq(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const;
  std::string tokenizer() const;  // bytes of tokenizer.model; empty when there is none

 private:
  void read_moment(const char* prefix, std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const;

  std::string path_;
  TrainerState state_;
  ModelConfig config_;
  ParameterTable table_;
  std::map<std::string, std::string> checksums_;
  std::optional<ModelReader> model_;
  std::optional<SafetensorsReader> moments_;
};

// What a run resumes from: the newest checkpoint that is complete and whose checksums agree; empty when the run has
// none yet. Each newer one that is damaged gives one warning and is left in place. When checkpoints exist and all are
// damaged, or the system fails to read one, it throws: starting afresh, or going back further than needed, would be a
// silent loss.
struct FoundCheckpoint {
  std::optional<Checkpoint> checkpoint;
  std::vector<std::string> warnings;
};
//
// Collective: rank 0 lists them, each rank verifies its share of the tensors, and all agree.
FoundCheckpoint find_checkpoint(const std::string& run_dir, Communicator& world);

}  // namespace onescale
