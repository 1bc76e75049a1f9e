// Checkpoints: RUN/checkpoints/step-00000100 is a Hugging Face directory that transformers loads, with
// optimizer*.safetensors (exp_avg.NAME, exp_avg_sq.NAME), tokenizer.model and trainer.json beside it. trainer.json is
// written last and holds the size and checksum of everything else: a directory without a valid one is no checkpoint.
#pragma once

#include <functional>
#include <optional>

#include "model/hf_files.h"
#include "train/model_weights.h"

namespace onescale {

struct TrainerState {
  std::int64_t step = 0;       // steps done
  std::int64_t samples = 0;    // position in the data: rows consumed
  std::int64_t bad_steps = 0;  // non-finite steps in a row, up to now
  std::int64_t skipped_steps = 0, clipped_steps = 0;
  double seconds = 0;     // of training so far
  std::string data_hash;  // of the training data, so that a resume notices other data under the same name
  std::vector<std::pair<std::string, std::string>> options;  // names and values, to list what a resume changes

  std::int64_t updates() const { return step - skipped_steps; }  // of the weights: Adam's count
};

struct CheckpointContents {
  TrainerState state;
  ModelConfig config;
  Gather weights;               // whole logical tensors, by position in the table
  std::vector<Gather> moments;  // exp_avg and exp_avg_sq, or none for SGD
  std::string tokenizer;        // bytes of tokenizer.model; empty for none
};

// Writes the checkpoint below run_dir, which is there, and returns its path. Free space is checked first: where there
// is too little, make_room is called, on rank 0, and the space looked at again. Everything goes to a temporary sibling
// that is synced and then renamed, so that a kill at any moment leaves the older checkpoints and at most a stale
// temporary, which the next save removes. Each rank of the world writes its own files, rank 0 trainer.json last, when
// all have succeeded. On a failure of any rank the temporary is removed and every rank throws Error. An existing
// directory of the same step is replaced.
std::string save_checkpoint(
    const std::string& run_dir, const CheckpointContents& contents, Communicator& world,
    const std::function<void()>& make_room = [] {});

// Removes what interrupted saves have left, and checkpoints of steps before `step`, which is whole, except the newest
// keep_last (counting that of `step`) and those whose step is a multiple of keep_every (0: none). Later steps, left by
// a run that was taken back, stay. Returns a sentence for each that could not be removed.
std::vector<std::string> prune_checkpoints(const std::string& run_dir, std::int64_t step, std::int64_t keep_last,
                                           std::int64_t keep_every);

// Reading one checkpoint. The constructor checks trainer.json and the size of every file, verify() the checksums; both
// throw DamagedFile, naming file and tensor, where the contents are wrong.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const TrainerState& state() const { return state_; }
  bool has_moments() const { return moments_.has_value(); }

  // Every `parts`-th tensor from `part` on, so that ranks can share the work.
  void verify(std::int64_t part = 0, std::int64_t parts = 1) const;

  // Values by position in the table, of the weights (""), or of the moments "exp_avg." or "exp_avg_sq."; they refer to
  // this object.
  FetchRange values(const std::string& prefix) const;

 private:
  const SafetensorsReader& files(const std::string& name) const {  // that hold this tensor
    return *(name.starts_with("exp_avg") ? moments_ : model_);
  }

  std::string path_;
  TrainerState state_;
  ParameterTable table_;
  std::map<std::string, std::string> checksums_;  // by tensor
  std::optional<SafetensorsReader> model_, moments_;
};

// What a run resumes from: the newest checkpoint that is complete and whose checksums agree; empty when the run has
// none yet. Each newer one that is damaged gives one warning and is left in place. When checkpoints exist and all are
// damaged, or the system fails to read one, it throws: starting afresh, or going back further than needed, would be a
// silent loss.
struct FoundCheckpoint {
  std::optional<Checkpoint> checkpoint;
  std::vector<std::string> warnings;
};
// Collective: rank 0 lists them, each rank verifies its share of the tensors, and all agree.
FoundCheckpoint find_checkpoint(const std::string& run_dir, Communicator& world);

}  // namespace onescale
