#include "train/training_run.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "kernels/error.h"
#include "parallel/agreement.h"
#include "parallel/file.h"
#include "parallel/replicas.h"
#include "train/commands.h"
#include "train/layout_check.h"
#include "train/schedule.h"

namespace onescale {

namespace fs = std::filesystem;

namespace {

// The double whose shortest text is that of the float: 0.1f is 0.1, not 0.10000000149.
double shortest(float x) {
  return std::stod(str(x));
}

// config.toml is written last: a start that was killed before it leaves the lock.
bool holds_run(const fs::path& dir) {
  return fs::exists(dir / "config.toml") || fs::exists(dir / ".lock");
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

struct TrainingRun::Lock {
  explicit Lock(const std::string& dir) : file(::open((dir + "/.lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
    check(file >= 0, "run_dir ", dir, " is not writable; give one that is");
    check(::flock(file, LOCK_EX | LOCK_NB) == 0, "run_dir ", dir,
          " is in use by another process; wait for it or give another run_dir");
  }
  ~Lock() { ::close(file); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  int file;
};

struct TrainingRun::Buffers {
  Buffers(Device& device, Mesh& mesh, const ModelConfig& config, const StepSettings& settings,
          std::int64_t sample_capacity)
      : weights(device, mesh, config, settings.zero),
        step(weights, settings),
        evaluator(weights, step.model(), settings.micro_batch, settings.seq_len) {
    if (sample_capacity > 0) decoder.emplace(step.model(), sample_capacity);
  }
  void run_empty(std::int64_t micro_batches) {
    step.run_empty(micro_batches);
    evaluator.run_empty();
    if (!decoder) return;
    const std::vector<std::int32_t> zeros(static_cast<std::size_t>(decoder->capacity() - 1), 0);
    decoder->append(zeros, weights.units());
    decoder->append(std::span(zeros).first(1), weights.units());
    decoder->reset();
  }
  ModelWeights weights;
  Step step;
  Evaluator evaluator;
  std::optional<Decoder> decoder;
};

TrainingRun::TrainingRun(const Options& options, World& world)
    : options_(options),
      world_(world),
      layout_(make_layout(world.communicator().size(), world.rank(), static_cast<int>(options.sp),
                          static_cast<int>(options.tp))),
      start_(std::chrono::steady_clock::now()) {
  // What is plainly wrong is refused before anything is made.
  make_device(options_, true);
  check_batch(options_.global_batch, options_.micro_batch, layout_);
  check_usage(fs::is_directory(options_.data), "data ", options_.data,
              " is not a directory; give one that onescale prepare has written");
  const fs::path dir = options_.run_dir;
  const bool existed = fs::exists(dir), was_run = holds_run(dir);
  world.communicator().barrier();  // all have looked before rank 0 makes anything
  try {
    open();
  } catch (...) {
    // A refused run leaves a place as it found it.
    const bool locked = lock_ != nullptr;
    log_.reset();
    lock_.reset();
    std::error_code ignored;
    if (!locked) throw;
    if (!existed)
      fs::remove_all(dir, ignored);
    else if (!was_run && fs::is_directory(dir))
      for (const char* name : {".lock", "log.txt", "metrics.jsonl"}) fs::remove(dir / name, ignored);
    throw;
  }
}

void TrainingRun::open() {
  Communicator& all = world_.communicator();
  on_root(all, [&] { make_directory(); });
  find_start();
  world_.check_same("program, options or data", identity(options_));
  if (!finished()) {
    together(all, [&] { open_data(); });
    world_.check_same("data", str(train_data_->describe(), " with hash ", state_.data_hash, "\n",
                                  val_data_ ? val_data_->describe() : ""));
  }
  on_root(all, [&] {
    // A launcher gives its ranks a terminal of its own, whatever its output goes to.
    const bool terminal = isatty(STDOUT_FILENO) != 0 && world_.launch().source.empty();
    log_ = std::make_unique<Log>(options_.run_dir, terminal, options_.log_every);
  });
  for (const std::string& note : notes_) say(note);
  if (finished()) return;
  mesh_ = std::make_unique<Mesh>(all, layout_);
  allocate();
  restore();
  on_root(all, [&] { write_text((fs::path(options_.run_dir) / "config.toml").string(), print_config(options_)); });
}

TrainingRun::~TrainingRun() = default;

void TrainingRun::say(const std::string& line) {
  if (log_) log_->line(line);
}

void TrainingRun::make_directory() {
  const fs::path dir = options_.run_dir;
  std::error_code error;
  if (fs::exists(dir)) {
    check_usage(fs::is_directory(dir), "run_dir ", dir.string(), " is not a directory");
    check_usage(holds_run(dir) || fs::is_empty(dir), "run_dir ", dir.string(),
                " holds files but no run; give a new directory or an empty one");
  }
  fs::create_directories(dir, error);
  check(!error, "run_dir ", dir.string(), " cannot be made: ", error.message());
  lock_ = std::make_unique<Lock>(options_.run_dir);
}

void TrainingRun::find_start() {
  FoundCheckpoint found = find_checkpoint(options_.run_dir, world_.communicator());
  notes_ = found.warnings;
  Flat before;
  if (found.checkpoint) {
    checkpoint_.emplace(std::move(*found.checkpoint));
    state_ = checkpoint_->state();
    before = state_.options;
    keep_dropout(checkpoint_->config());
  } else if (const std::string file = (fs::path(options_.run_dir) / "config.toml").string(); fs::exists(file)) {
    const char* command[] = {"onescale", "train", "--config", file.c_str()};
    before = flat(parse(4, command).options);
  }
  for (const Change& change : changed(before, settings())) {
    check_usage(!change.fixed, "run_dir ", options_.run_dir, " holds a run with ", change.name, " = ", change.before,
                ", not ", change.after, "; give that value or another run_dir");
    notes_.push_back(str("changed since the checkpoint: ", change.name, " was ", change.before, ", is ", change.after));
  }
}

// The options and the number of ranks, as checkpoints keep them.
Flat TrainingRun::settings() const {
  Flat all = flat(options_);
  all.emplace_back("world", std::to_string(layout_.world()));
  return all;
}

// Dropout that no option sets is that of the model which the run goes on with.
void TrainingRun::keep_dropout(const ModelConfig& config) {
  if (!options_.has("embd_pdrop")) options_.embd_pdrop = shortest(config.embd_pdrop);
  if (!options_.has("resid_pdrop")) options_.resid_pdrop = shortest(config.resid_pdrop);
  if (!options_.has("attn_pdrop")) options_.attn_pdrop = shortest(config.attn_pdrop);
}

void TrainingRun::open_data() {
  const fs::path tokenizer_file = fs::path(options_.data) / "tokenizer.model";
  if (fs::exists(tokenizer_file)) tokenizer_ = Tokenizer::load(tokenizer_file.string());
  const std::int64_t tokenizer_size = tokenizer_ ? tokenizer_->vocab_size() : 0;

  if (checkpoint_) {
    config_ = checkpoint_->config();
  } else if (!options_.model.empty()) {
    source_.emplace(options_.model);
    config_ = source_->config();
    keep_dropout(config_);
  } else {
    check_usage(options_.vocab_size > 0 || tokenizer_size > 0, options_.data,
                " has no tokenizer.model to take the vocabulary's size from; set vocab_size");
    config_ = config_from_options(options_, tokenizer_size);
    if (tokenizer_) config_.bos_token_id = config_.eos_token_id = tokenizer_->eot();
  }
  config_.embd_pdrop = static_cast<float>(options_.embd_pdrop);
  config_.resid_pdrop = static_cast<float>(options_.resid_pdrop);
  config_.attn_pdrop = static_cast<float>(options_.attn_pdrop);
  check_usage(tokenizer_size <= config_.vocab_size, "the tokenizer in ", options_.data, " has ", tokenizer_size,
              " ids, the model's vocab_size is ", config_.vocab_size, "; it must be at least as large");
  check_usage(options_.sample_every == 0 || tokenizer_, "sample_every needs a tokenizer.model in ", options_.data);

  seq_len_ = options_.seq_len ? options_.seq_len : config_.n_positions;
  check_usage(seq_len_ <= config_.n_positions, "seq_len ", seq_len_, " is over the model's n_positions ",
              config_.n_positions, "; shorten it or train a model with more positions");
  check_layout(config_, seq_len_, layout_, options_.sp_mode);
  Vocabulary vocabulary;
  vocabulary.size = config_.vocab_size;
  if (tokenizer_) vocabulary.hash = tokenizer_->hash();
  train_data_.emplace(options_.data, "train", vocabulary);
  train_.emplace(*train_data_, seq_len_, static_cast<std::uint64_t>(options_.seed), SampleOrder::shuffled);
  train_->require_rows(options_.global_batch);
  if (options_.eval_every > 0) {
    check(Dataset::exists(options_.data, "val"), options_.data,
          " has no validation shards; prepare it with val_share, or set eval_every = 0");
    val_data_.emplace(options_.data, "val", vocabulary);
    val_.emplace(*val_data_, seq_len_, 0, SampleOrder::sequential);
  }
  const std::string data_hash = str(std::hex, train_data_->hash());
  if (checkpoint_) {
    check_usage(checkpoint_->tokenizer() == (tokenizer_ ? tokenizer_->model() : std::string()), "the tokenizer in ",
                options_.data, " is not the one that the run in ", options_.run_dir, " was begun with");
    check_usage(state_.data_hash == data_hash, options_.data, " is not the data that the run in ", options_.run_dir,
                " was begun with (hash ", data_hash, ", not ", state_.data_hash, "); give that or another run_dir");
  }
  state_.data_hash = data_hash;
}

void TrainingRun::allocate() {
  const StepSettings settings = step_settings(options_, seq_len_);
  std::int64_t sample_capacity = 0;
  if (options_.sample_every > 0) {
    const auto prompt = static_cast<std::int64_t>(tokenizer_->encode(options_.sample_prompt).size()) + 1;
    check_usage(prompt < config_.n_positions, "sample_prompt is ", prompt, " tokens long, n_positions is ",
                config_.n_positions, "; shorten it");
    sample_capacity = std::max<std::int64_t>(2, std::min(prompt + options_.sample_tokens, config_.n_positions));
  }
  Plan plan;
  const std::int64_t micro_batches = options_.global_batch / layout_.dp / options_.micro_batch;
  device_ = planned_device(
      of_rank(options_, world_.communicator()), layout_,
      [&](Device& dry, Mesh& groups) {
        Buffers(dry, groups, config_, settings, sample_capacity).run_empty(micro_batches);
      },
      &plan);
  if (layout_.world() > 1) {
    say(str("layout       ", layout_.text(), ", zero ", options_.zero));
  }
  say(str("device       ", device_->describe()));
  say(str("model        ", config_.parameters(), " parameters: n_layer ", config_.n_layer, ", n_embd ", config_.n_embd,
          ", n_head ", config_.n_head, config_.multi_query ? " (multi-query)" : "", ", vocab_size ",
          config_.vocab_size));
  say(str("data         ", train_data_->describe(), ", ", train_->windows(), " windows of ", seq_len_, "; ",
          static_cast<double>(options_.steps * options_.global_batch) / static_cast<double>(train_->windows()),
          " epochs in ", options_.steps, " steps of ", options_.global_batch, " rows"));
  say("memory\n" + memory_table(*plan.device));
  buffers_ = std::make_unique<Buffers>(*device_, *mesh_, config_, settings, sample_capacity);
  peak_flops_ = 0;
  for (const double peak : world_.communicator().exchange(device_->peak_flops())) peak_flops_ += peak;
}

void TrainingRun::restore() {
  Step& step = buffers_->step;
  if (checkpoint_) {
    const auto range = [&](auto read) {
      return [&, read](std::size_t i, std::int64_t first, std::int64_t count, float* out) {
        ((*checkpoint_).*read)(i, first, count, out);
      };
    };
    buffers_->weights.load(range(&Checkpoint::read_weights));
    if (step.optimizer().has_moments()) {
      check(checkpoint_->has_moments(), checkpoint_->path(), " has no optimizer state for optimizer = adamw");
      step.load_moments(0, range(&Checkpoint::read_exp_avg));
      step.load_moments(1, range(&Checkpoint::read_exp_avg_sq));
    }
    step.optimizer().set_updates(state_.updates);
    say(str("resumed from ", checkpoint_->path(), ": step ", state_.step, ", data position ", state_.samples));
  } else if (source_) {
    buffers_->weights.load(source_->fetch());
    say("weights from " + source_->dir());
  } else {
    buffers_->weights.initialise(static_cast<std::uint64_t>(options_.seed));
  }
  saved_step_ = checkpoint_ ? state_.step : -1;
  state_.seed = static_cast<std::uint64_t>(options_.seed);
  state_.options = settings();
  on_root(world_.communicator(), [&] { metrics_ = std::make_unique<MetricsFile>(options_.run_dir, state_.step); });
  if (!options_.trace.empty()) trace_ = std::make_unique<Trace>(options_.trace, options_.trace_steps, *device_, *mesh_);
  checkpoint_.reset();
}

int TrainingRun::run() {
  if (finished()) {
    say(str("finished: ", state_.step, " of ", options_.steps, " steps are done; raise steps to go on"));
    return 0;
  }
  const int code = steps();
  if (trace_) trace_->finish();
  return code;
}

int TrainingRun::steps() {
  // An evaluation or a sample belongs to the step before which it is made: an interrupted one is made when the run goes
  // on. Those after the last step are not interrupted by a first signal, since nothing would go on.
  while (true) {
    if (state_.step > 0 && (finished() || !stopping())) {
      if (due(options_.eval_every)) evaluate();
      if (due(options_.sample_every) && (finished() || !stopping())) write_sample();
    }
    if (finished()) break;
    if (stopping()) {
      if (state_.bad_steps > 0 && saved_step_ >= 0) {
        say(str("stopped after ", state_.bad_steps, " steps that were not finite; the same command goes on from step ",
                saved_step_));
        return exit_requeue;
      }
      check(saved_step_ == state_.step || save(), "stopped at step ", state_.step, " without saving it");
      say(str("stopped at step ", state_.step, " of ", options_.steps, " and saved; the same command goes on"));
      return exit_requeue;
    }
    one_step();
    // Weights that give no finite gradient are not worth an older checkpoint.
    if (state_.bad_steps == 0 && (due(options_.save_every) || finished())) {
      const bool saved = save();
      check(saved || !finished(), "step ", state_.step, ", the last, could not be saved in ", options_.run_dir,
            ": see log.txt there for why, then start the same command again");
    }
  }
  check(state_.bad_steps == 0, "the last ", state_.bad_steps,
        " steps were not finite and are not saved; go on from step ", saved_step_, " with a lower lr");
  say(str("finished ", options_.steps, " steps"));
  return 0;
}

bool TrainingRun::stopping() {
  const bool mine =
      signals_.received() != 0 || time_is_up() || (options_.stop_after > 0 && steps_here_ >= options_.stop_after);
  const std::vector<char> all = world_.communicator().exchange(static_cast<char>(mine));
  return std::any_of(all.begin(), all.end(), [](char stop) { return stop != 0; });
}

void TrainingRun::one_step() {
  const auto begin = std::chrono::steady_clock::now();
  world_.set_step(state_.step);
  for (Communicator* group : mesh_->groups()) group->reset_traffic();
  const std::int64_t rows = options_.global_batch / layout_.dp, first = state_.samples + layout_.dp_rank() * rows;
  const Batch batch = train_->rows(first, rows);
  train_->prefetch(first + options_.global_batch, rows);
  if (options_.check_replicas > 0 && state_.step % options_.check_replicas == 0 && layout_.world() > 1) {
    ModelWeights& weights = buffers_->weights;
    check_replicas(*device_, *mesh_, weights.place(), weights.units(), weights.zero().stage);
  }
  const double lr = learning_rate(options_, state_.step);
  const StepResult result =
      buffers_->step.run({batch.ids.data(), batch.labels.data(), batch.rows}, state_.seed, state_.step, lr);
  const double seconds = seconds_since(begin);
  longest_step_ = std::max(longest_step_, seconds);
  if (trace_) trace_->step_done();
  report(result, seconds, lr);
  ++steps_here_;
  check(state_.bad_steps < options_.max_bad_steps, "step ", state_.step, ": loss or gradient was not finite in ",
        state_.bad_steps, " steps in a row (max_bad_steps); ",
        saved_step_ >= 0
            ? str("the checkpoint of step ", saved_step_, " is of before them, go on from it with a lower lr")
            : std::string("there is no checkpoint yet, start again with a lower lr"));
}

Json TrainingRun::event(const char* name) const {
  Json line = Json::object();
  line.set("step", state_.step);
  line.set("event", name);
  return line;
}

void TrainingRun::report(const StepResult& result, double seconds, double lr) {
  const bool bad = result.outcome == StepResult::Outcome::not_finite;
  if (result.outcome == StepResult::Outcome::updated) {
    ++state_.updates;
    state_.clipped_steps += result.clip_coef < 1;
    state_.bad_steps = 0;
  } else {
    ++state_.skipped_steps;
    state_.bad_steps = bad ? state_.bad_steps + 1 : state_.bad_steps;
    say(str("step ", state_.step, " skipped: ",
            bad ? str("the gradient's norm is ", result.grad_norm, ", the loss ", result.loss)
                : std::string("every label is ignored")));
  }
  const std::int64_t tokens = options_.global_batch * seq_len_;
  state_.tokens_seen += tokens;
  state_.seconds += seconds;
  const double rate = static_cast<double>(tokens) / seconds;
  const double mfu = rate * flops_per_token(config_, seq_len_).with_attention / peak_flops_;

  Json line = Json::object();
  line.set("step", state_.step);
  line.set("loss", result.loss);
  line.set("good_tokens", result.good_tokens);
  char hash[24];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(result.batch_hash));
  line.set("batch_hash", hash);
  line.set("grad_norm", result.grad_norm);
  line.set("clip_coef", result.clip_coef);
  line.set("lr", lr);
  line.set("tokens_seen", state_.tokens_seen);
  line.set("skipped_steps", state_.skipped_steps);
  line.set("clipped_steps", state_.clipped_steps);
  line.set("tokens_per_s", rate);
  line.set("mfu", mfu);
  line.set("seconds", state_.seconds);
  if (layout_.world() > 1) {
    Json waits = Json::object();
    for (const Communicator* group : mesh_->groups()) {
      if (group->size() > 1) waits.set(group->name(), group->traffic().exposed_seconds());
    }
    line.set("exposed_wait", waits);
  }
  if (metrics_) metrics_->write(line);
  ++state_.step;
  state_.samples += options_.global_batch;
  if (!log_) return;
  log_->progress({state_.step, options_.steps, result.loss, result.grad_norm, lr, rate, mfu,
                  static_cast<double>(options_.steps - state_.step) * seconds_since(start_) /
                      static_cast<double>(steps_here_ + 1)});
}

bool TrainingRun::time_is_up() const {
  if (options_.max_minutes <= 0 || steps_here_ == 0) return false;  // a session makes some progress
  return seconds_since(start_) + longest_step_ + 2 * longest_save_ > options_.max_minutes * 60;
}

bool TrainingRun::save() {
  const auto begin = std::chrono::steady_clock::now();
  Step& step = buffers_->step;
  ModelWeights& weights = buffers_->weights;
  const auto gather = [&](const Assembly::Source& source) {
    return [&weights, source](const std::vector<std::int64_t>& wanted, float* out) {
      weights.assembly().gather(wanted, source, out);
    };
  };
  CheckpointContents contents{state_,
                              config_,
                              weights.table(),
                              gather(weights.source()),
                              {},
                              {},
                              tokenizer_ ? tokenizer_->model() : std::string()};
  if (step.optimizer().has_moments()) {
    contents.exp_avg = gather(step.moment_source(0));
    contents.exp_avg_sq = gather(step.moment_source(1));
  }
  try {
    const std::string path = save_checkpoint(options_.run_dir, contents, world_.communicator());
    saved_step_ = state_.step;
    say("saved " + path);
  } catch (const Error& error) {
    say(str("not saved at step ", state_.step, ": ", error.what()));
    Json line = event("save_failed");
    line.set("error", error.what());
    if (metrics_) metrics_->write(line);
    return false;
  }
  if (root()) {
    for (const std::string& warning :
         prune_checkpoints(options_.run_dir, state_.step, options_.keep_last, options_.keep_every)) {
      say(warning);
    }
  }
  longest_save_ = std::max(longest_save_, seconds_since(begin));
  return true;
}

void TrainingRun::evaluate() {
  const auto stop = [&] { return !finished() && stopping(); };
  const EvalResult result =
      buffers_->evaluator.run(*val_, tokenizer_ ? &*tokenizer_ : nullptr, options_.eval_rows, stop);
  if (stop()) return;
  Json line = event("eval");
  line.set("loss", result.loss());
  line.set("perplexity", result.perplexity());
  if (result.bytes > 0) line.set("bits_per_byte", result.bits_per_byte());
  line.set("good_tokens", result.good_tokens);
  if (metrics_) metrics_->write(line);
  say(str("step ", state_.step, " held-out ", result.text()));
}

void TrainingRun::write_sample() {
  std::vector<std::int32_t> prompt = {tokenizer_->eot()};
  const std::vector<std::int32_t> ids = tokenizer_->encode(options_.sample_prompt);
  prompt.insert(prompt.end(), ids.begin(), ids.end());
  SampleSettings settings;
  settings.temperature = options_.temperature;
  settings.top_k = options_.top_k;
  settings.top_p = options_.top_p;
  settings.max_new_tokens = options_.sample_tokens;
  settings.seed = state_.seed;
  const std::vector<std::int32_t> added = generate(*buffers_->decoder, buffers_->weights.units(), prompt,
                                                   tokenizer_->eot(), settings, [](std::int32_t) { return true; });
  const std::string text = tokenizer_->decode(added);
  Json line = event("sample");
  line.set("prompt", options_.sample_prompt);
  // JSON holds no bytes that are not UTF-8; Json::dump replaces them.
  line.set("text", text);
  if (metrics_) metrics_->write(line);
  say(str("step ", state_.step, " sample: ", options_.sample_prompt, "|", text));
}

}  // namespace onescale
