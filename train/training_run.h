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
#include "train/signals.h"
#include "train/trace.h"

namespace onescale {

// RUN/config.toml, metrics.jsonl, log.txt and checkpoints/. Everything is checked, and all memory taken, before the
// first step. Every rank of the world makes one; rank 0 alone writes the log and the metrics.
class TrainingRun {
 public:
  TrainingRun(const Options& options, World& world);
  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  // Runs until the last step, a signal, max_minutes or stop_after. 0: finished; 75: saved, start it again. Throws after
  // max_bad_steps steps in a row whose gradient is not finite; the newest checkpoint is then of before them.
  int run();

 private:
  struct Lock;     // of the run directory
  struct Buffers;  // everything on the device

  void open();  // what the constructor does
  void make_directory();
  void find_start();
  Flat settings() const;
  void open_data();
  void keep_dropout(const ModelConfig& config);
  void allocate();
  void restore();

  void say(const std::string& line);
  int steps();      // until one of run()'s ends
  bool stopping();  // the same answer on every rank
  void one_step();
  void report(const StepResult& result, double seconds, double lr);
  bool save();  // false, with a warning, when it failed
  void evaluate();
  void write_sample();
  bool due(std::int64_t every) const {
    return every > 0 && (state_.step % every == 0 || state_.step == options_.steps);
  }
  bool finished() const { return state_.step >= options_.steps; }
  bool time_is_up() const;
  bool root() const { return world_.rank() == 0; }
  Json event(const char* name) const;

  Options options_;
  World& world_;
  Layout layout_;
  std::unique_ptr<Mesh> mesh_;
  StopSignals signals_;
  std::unique_ptr<Lock> lock_;
  std::optional<Checkpoint> checkpoint_;  // what this session resumes from
  std::optional<ModelSource> source_;     // of the first weights, when they are not random
  ModelConfig config_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Dataset> train_data_, val_data_;
  std::optional<Batches> train_, val_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<Log> log_;
  std::unique_ptr<MetricsFile> metrics_;
  TrainerState state_;
  std::vector<std::string> notes_;  // for the log, once the run is known to be right
  std::int64_t seq_len_ = 0, steps_here_ = 0, saved_step_ = -1;
  double peak_flops_ = 0, longest_step_ = 0, longest_save_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace onescale
