// How a run begins: its directory, what it goes on from, its data, and its memory.
#include "train/training_run.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "kernels/error.h"
#include "parallel/agreement.h"
#include "parallel/file.h"
#include "train/layout_check.h"
#include "train/schedule.h"
#include "train/signals.h"

namespace onescale {

namespace fs = std::filesystem;

// config.toml is written last: a start that was killed before it leaves the lock.
RunDirectory::RunDirectory(const std::string& path) : path_(path) {
  std::error_code error;
  existed_ = fs::exists(path, error);
  was_run_ = fs::exists(path + "/config.toml", error) || fs::exists(path + "/.lock", error);
  check_usage(!existed_ || fs::is_directory(path), "run_dir ", path, " is not a directory");
  check_usage(!existed_ || was_run_ || fs::is_empty(path), "run_dir ", path,
              " holds files but no run; give a new directory or an empty one");
  fs::create_directories(path, error);
  check(!error, "run_dir ", path, ": cannot be made: ", error.message(), "; check the path and its rights");
  lock_ = ::open((path + "/.lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  check(lock_ >= 0, "run_dir ", path, " is not writable; give one that is");
  const int unlocked = ::flock(lock_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  if (unlocked == EWOULDBLOCK) ::close(lock_);
  check(unlocked != EWOULDBLOCK, "run_dir ", path,
        " is in use by another process; wait for it or give another run_dir");
  if (unlocked != 0)  // Lustre and NFS may be mounted without locks
    warning_ = brief("run_dir ", path, " is not locked (", std::strerror(unlocked),
                     "): see to it that no other process uses it");
  for (const char* name : {"/config.toml", "/metrics.jsonl"}) remove_abandoned(path + name);
}

void RunDirectory::check_there() const {
  struct stat ours = {};
  struct stat there = {};
  const bool found = ::stat((path_ + "/.lock").c_str(), &there) == 0;
  if (!found && errno != ENOENT && errno != ENOTDIR) return;  // a server that does not answer now
  check(found && ::fstat(lock_, &ours) == 0 && ours.st_ino == there.st_ino && ours.st_dev == there.st_dev, "run_dir ",
        path_, " was removed, moved or replaced while the run went on; put it back, or start again");
}

RunDirectory::~RunDirectory() {
  std::error_code ignored;
  ::close(lock_);
  if (!existed_) fs::remove_all(path_, ignored);
  if (was_run_) return;
  for (const char* name : {"/.lock", "/log.txt", "/metrics.jsonl"}) fs::remove(path_ + name, ignored);
}

TrainingRun::Buffers::Buffers(Device& device, Mesh& mesh, const ModelConfig& config, const StepSettings& settings,
                              std::int64_t sample_capacity)
    : weights(device, mesh, config, settings.zero),
      step(weights, settings),
      evaluator(weights, step.model(), settings.micro_batch, settings.seq_len) {
  if (sample_capacity > 0) decoder.emplace(step.model(), sample_capacity);
}

void TrainingRun::Buffers::run_empty(std::int64_t micro_batches, std::span<const std::int32_t> prompt) {
  step.run_empty(micro_batches);
  evaluator.run_empty();
  if (!decoder) return;
  decoder->append(prompt, weights.units());
  decoder->append(prompt.first(1), weights.units());
}

TrainingRun::TrainingRun(const Options& options, World& world)
    : options_(options),
      world_(world),
      layout_(layout_of(options, world.communicator())),
      start_(std::chrono::steady_clock::now()) {
  // What is plainly wrong is refused before anything is made.
  make_device(options_, true);
  check_batch(options_.global_batch, options_.micro_batch, layout_);
  check_usage(fs::is_directory(options_.data), "data ", options_.data,
              " is not a directory; give one that onescale prepare has written");
  // Where nothing is held out, an evaluation is missed only if it was asked for.
  if (!options_.has("eval_every") && !Dataset::exists(options_.data, "val")) options_.eval_every = 0;
  catch_stop_signals();
  Communicator& all = world_.communicator();
  on_root(all, [&] {
    directory_ = std::make_unique<RunDirectory>(options_.run_dir);
    // A launcher gives its ranks a terminal of its own, whatever its output goes to.
    const bool terminal = isatty(STDOUT_FILENO) != 0 && world_.launch().source.empty();
    log_ = std::make_unique<Log>(options_.run_dir, terminal);
    if (!directory_->warning().empty()) say(directory_->warning());
  });
  find_start();
  world_.check_same("program, options or data", identity(options_));
  on_root(all, [&] { complete_ = complete(); });
  complete_ = all.exchange(static_cast<char>(complete_)).front() != 0;
  if (!complete_) {
    together(all, [&] { open_data(); });
    world_.check_same("data", str(train_data_->describe(), " with hash ", state_.data_hash, "\n",
                                  val_data_ ? val_data_->describe() : ""));
    mesh_ = std::make_unique<Mesh>(all, layout_);
    allocate();
    restore();
    on_root(all, [&] { write_text(options_.run_dir + "/config.toml", print_config(options_)); });
  }
  if (directory_) directory_->keep();
}

void TrainingRun::find_start() {
  FoundCheckpoint found = find_checkpoint(options_.run_dir, world_.communicator());
  for (const std::string& warning : found.warnings) say(shortened(warning));
  checkpoint_ = std::move(found.checkpoint);
  if (checkpoint_) state_ = checkpoint_->state();
  Flat before = state_.options;
  if (const std::string file = options_.run_dir + "/config.toml"; !checkpoint_ && fs::exists(file)) {
    const char* command[] = {"onescale", "train", "--config", file.c_str()};
    before = flat(parse(4, command).options);
  }
  together(world_.communicator(), [&] {
    if (checkpoint_ || !options_.model.empty()) source_.emplace(checkpoint_ ? checkpoint_->path() : options_.model);
  });
  if (source_) {
    config_ = source_->config();
    // Dropout that no option sets is that of the model which the run goes on with. 0.1f is 0.1, not 0.10000000149.
    const auto keep = [&](const char* name, double& option, float& value) {
      if (!options_.has(name)) option = std::stod(str(value));
      value = static_cast<float>(option);
    };
    keep("embd_pdrop", options_.embd_pdrop, config_.embd_pdrop);
    keep("resid_pdrop", options_.resid_pdrop, config_.resid_pdrop);
    keep("attn_pdrop", options_.attn_pdrop, config_.attn_pdrop);
  }
  for (const Change& change : changed(before, settings())) {
    check_usage(!change.fixed, "run_dir ", options_.run_dir, " holds a run with ", change.name, " = ", change.before,
                ", not ", change.after, "; give that value or another run_dir");
    say(brief("changed since the checkpoint: ", change.name, " was ", change.before, ", is ", change.after));
  }
  if (state_.step == 0) return;
  Options old = options_;
  for (const auto& [name, value] : before) {
    for (const char* of_schedule : {"lr", "min_lr", "warmup_steps", "schedule", "decay_steps", "steps"})
      if (name == of_schedule) set_option(old, *find_option(name), {value}, options_.run_dir);
  }
  const double last = learning_rate(old, state_.step - 1), next = learning_rate(options_, state_.step),
               expected = learning_rate(old, state_.step);
  if (!finished() && std::abs(next - expected) > 0.01 * expected)
    say("the learning rate goes from ", last, " at the last step to ", next,
        " by these changes; it stays with schedule constant and lr ", last);
}

bool TrainingRun::complete() const {
  const auto there = [&](std::int64_t every, const char* event) {
    return !due(every) || has_event(options_.run_dir, state_.step, event);
  };
  return finished() && there(options_.eval_every, "eval") && there(options_.sample_every, "sample");
}

// The options and the number of ranks, as checkpoints keep them.
Flat TrainingRun::settings() const {
  Flat all = flat(options_);
  all.emplace_back("world", std::to_string(layout_.world()));
  return all;
}

void TrainingRun::open_data() {
  tokenizer_ = tokenizer_in(options_.data);
  if (source_) {
    std::optional<Tokenizer> own = source_->tokenizer();
    check_usage(!own || !tokenizer_ || own->hash() == tokenizer_->hash(), "the tokenizer in ", options_.data,
                " is not that of ", source_->dir(), "; prepare the text with --tokenizer ", source_->dir(),
                "/tokenizer.model");
    if (!own && tokenizer_ && !checkpoint_)
      say(source_->dir(), " has no tokenizer.model: that ", options_.data, " is of its tokenizer is not checked");
    if (!tokenizer_) tokenizer_ = std::move(own);
  }
  Vocabulary vocabulary;
  if (tokenizer_) vocabulary.hash = tokenizer_->hash();
  const std::int64_t tokenizer_size = tokenizer_ ? tokenizer_->vocab_size() : 0;
  if (!source_) {
    check_usage(options_.vocab_size > 0 || tokenizer_, options_.data,
                " has no tokenizer.model to take the vocabulary's size from; set vocab_size");
    config_ = config_from_options(options_, tokenizer_size);
    if (tokenizer_) config_.bos_token_id = config_.eos_token_id = tokenizer_->eot();
  }
  check_usage(tokenizer_size <= config_.vocab_size, "the tokenizer in ", options_.data, " has ", tokenizer_size,
              " ids, the model's vocab_size is ", config_.vocab_size, "; it must be at least as large");
  seq_len_ = options_.seq_len ? options_.seq_len : config_.n_positions;
  check_usage(seq_len_ <= config_.n_positions, "seq_len ", seq_len_, " is over the model's n_positions ",
              config_.n_positions, "; shorten it or train a model with more positions");
  check_layout(config_, seq_len_, layout_, options_.sp_mode);
  if (options_.sample_every > 0) {
    check_usage(tokenizer_.has_value(), "sample_every needs a tokenizer.model in ", options_.data);
    prompt_ = tokenizer_->encode(options_.sample_prompt);
    prompt_.insert(prompt_.begin(), tokenizer_->eot());
    check_usage(std::ssize(prompt_) < config_.n_positions, "sample_prompt is ", prompt_.size(),
                " tokens long, n_positions is ", config_.n_positions, "; shorten it");
  }

  vocabulary.size = config_.vocab_size;
  train_data_.emplace(options_.data, "train", vocabulary);
  train_.emplace(*train_data_, seq_len_, static_cast<std::uint64_t>(options_.seed), SampleOrder::shuffled);
  train_->require_rows(options_.global_batch);
  if (options_.eval_every > 0) {
    check(Dataset::exists(options_.data, "val"), options_.data,
          " holds nothing out to evaluate on; prepare it with another val_share, or leave eval_every out");
    val_data_.emplace(options_.data, "val", vocabulary);
    val_.emplace(*val_data_, seq_len_, 0, SampleOrder::sequential);
  } else if (!options_.has("eval_every")) {
    say("evaluation   none: nothing is held out in ", options_.data);
  }
  const std::string data_hash = str(std::hex, train_data_->hash());
  if (checkpoint_) {
    check_usage(state_.data_hash == data_hash, options_.data, " is not the data that the run in ", options_.run_dir,
                " was begun with (hash ", data_hash, ", not ", state_.data_hash, "); give that or another run_dir");
  }
  state_.data_hash = data_hash;
}

void TrainingRun::allocate() {
  const StepSettings settings = step_settings(options_, seq_len_);
  const std::int64_t samples = std::min(std::ssize(prompt_) + options_.sample_tokens, config_.n_positions),
                     capacity = prompt_.empty() ? 0 : samples,
                     micro_batches = options_.global_batch / layout_.dp / options_.micro_batch;
  std::string memory;
  const Options own = of_rank(options_, world_.communicator());
  device_ = planned_device(
      own, layout_,
      [&](Device& dry, Mesh& groups) {
        Buffers(dry, groups, config_, settings, capacity).run_empty(micro_batches, prompt_);
      },
      &memory);
  if (layout_.world() > 1) say("layout       ", layout_.text(), ", zero ", options_.zero);
  say("device       ", device_->describe());
  say("model        ", config_.parameters(), " parameters: n_layer ", config_.n_layer, ", n_embd ", config_.n_embd,
      ", n_head ", config_.n_head, config_.multi_query ? " (multi-query)" : "", ", vocab_size ", config_.vocab_size);
  say("data         ", train_data_->describe(), ", ", train_->windows(), " windows of ", seq_len_, "; ",
      static_cast<double>(options_.steps * options_.global_batch) / static_cast<double>(train_->windows()),
      " epochs in ", options_.steps, " steps of ", options_.global_batch, " rows");
  say("memory\n" + memory);
  buffers_ = std::make_unique<Buffers>(*device_, *mesh_, config_, settings, capacity);
  const std::int64_t threads = own.threads > 0 ? own.threads : available_threads();
  peak_flops_ = combined_peak(world_.communicator().exchange(
      RankPeak{Place::here(), threads, device_->peak_flops(parse_dtype(options_.dtype))}));
}

void TrainingRun::restore() {
  if (source_)
    buffers_->weights.load(source_->fetch());
  else
    buffers_->weights.initialise(static_cast<std::uint64_t>(options_.seed));
  if (checkpoint_) {
    Step& step = buffers_->step;
    for (const int which : {0, 1}) {
      if (step.optimizer().has_moments())
        step.load_moments(which, checkpoint_->values(which == 0 ? "exp_avg." : "exp_avg_sq."));
    }
    step.optimizer().set_updates(state_.updates());
    saved_step_ = state_.step;
    prune(options_.keep_last);  // a disk that is full may need it before anything is written
    say("resumed from ", checkpoint_->path(), ": step ", state_.step, ", data position ", state_.samples);
  } else if (source_) {
    say("weights from " + source_->dir());
  }
  checkpoint_.reset();
  state_.options = settings();
  on_root(world_.communicator(), [&] { metrics_ = std::make_unique<MetricsFile>(options_.run_dir, state_.step); });
  if (!options_.trace.empty()) trace_ = std::make_unique<Trace>(options_.trace, options_.trace_steps, *device_, *mesh_);
}

}  // namespace onescale
