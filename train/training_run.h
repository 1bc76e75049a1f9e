// A run directory and the loop over its steps.
#pragma once

#include <chrono>
#include <optional>

#include "data/batches.h"
#include "parallel/launch.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/sample.h"
#include "train/session.h"
#include "train/trace.h"

namespace onescale {

// RUN/config.toml, metrics.jsonl, log.txt and checkpoints/, locked against a second process where the file system can.
// One that is given up before keep() is left as it was found.
class RunDirectory {
 public:
  explicit RunDirectory(const std::string& path);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;
  void keep() { existed_ = was_run_ = true; }
  const std::string& warning() const { return warning_; }  // a sentence, or empty
  void check_there() const;                                // throws where the directory has been removed or replaced

 private:
  std::string path_, warning_;
  bool existed_, was_run_;
  int lock_ = -1;
};

// Everything is checked, and all memory taken, before the first step. Every rank of the world makes one; rank 0 alone
// writes the log and the metrics.
class TrainingRun {
 public:
  TrainingRun(const Options& options, World& world);

  // Runs until the last step, a signal, max_minutes or stop_after. 0: finished; 75: saved, start it again. Throws after
  // max_bad_steps steps in a row whose gradient is not finite; the newest checkpoint is then of before them.
  int run();

 private:
  // Everything on the device; a decoder where samples are written.
  struct Buffers {
    Buffers(Device& device, Mesh& mesh, const ModelConfig& config, const StepSettings& settings,
            std::int64_t sample_capacity);
    void run_empty(std::int64_t micro_batches, std::span<const std::int32_t> prompt);
    ModelWeights weights;
    Step step;
    Evaluator evaluator;
    std::optional<Decoder> decoder;
  };

  // What the constructor does.
  void find_start();
  bool complete() const;  // the last step is done, and what is due after it
  Flat settings() const;
  void open_data();
  void allocate();
  void restore();

  int steps();      // until one of run()'s ends
  bool stopping();  // the same answer on every rank
  void one_step();
  void report(const StepResult& result, double seconds, double lr);
  bool save();                         // false, with a warning, when it failed
  void prune(std::int64_t keep_last);  // never the newest whole checkpoint
  void evaluate();
  void write_sample();
  bool due(std::int64_t every) const {
    return every > 0 && (state_.step % every == 0 || state_.step == options_.steps);
  }
  void check_updated() const;
  std::string way_back() const;  // what to do after steps that were not finite
  bool finished() const { return state_.step >= options_.steps; }
  template <class... Args>
  void say(const Args&... line) {
    if (log_) log_->line(str(line...));
  }
  void record(const Json& line) {
    if (!metrics_) return;
    directory_->check_there();
    metrics_->write(line);
  }

  Options options_;
  World& world_;
  Layout layout_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<RunDirectory> directory_;
  std::unique_ptr<Log> log_;
  std::unique_ptr<MetricsFile> metrics_;
  std::optional<Checkpoint> checkpoint_;  // what this session resumes from
  std::optional<ModelSource> source_;     // of its weights, or of the first ones when they are not random
  ModelConfig config_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Dataset> train_data_, val_data_;
  std::optional<Batches> train_, val_;
  std::vector<std::int32_t> prompt_;  // of samples
  std::unique_ptr<Device> device_;
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<Trace> trace_;
  TrainerState state_;
  bool complete_ = false;
  std::int64_t seq_len_ = 0, steps_here_ = 0, saved_step_ = -1;
  double peak_flops_ = 0, longest_step_ = 0, longest_save_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace onescale
