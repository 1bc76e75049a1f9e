// `onescale train`, the loop over a run's steps: one command starts a run, resumes it after any interruption, and says
// when it is finished.
#include <algorithm>

#include "kernels/error.h"
#include "parallel/replicas.h"
#include "train/commands.h"
#include "train/schedule.h"
#include "train/signals.h"
#include "train/training_run.h"

namespace onescale {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int train_command(const Options& options, World& world) {
  return TrainingRun(options, world).run();
}

int TrainingRun::run() {
  if (complete_) {
    check_updated();
    say("finished: ", state_.step, " of ", options_.steps, " steps are done; raise steps to go on");
    return 0;
  }
  const int code = steps();
  if (trace_) trace_->finish();
  if (directory_) directory_->check_there();
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
        say("stopped after ", state_.bad_steps, " steps that were not finite; the same command goes on from step ",
            saved_step_);
        return exit_requeue;
      }
      check(saved_step_ == state_.step || save(), "stopped at step ", state_.step, " without saving it");
      say("stopped at step ", state_.step, " of ", options_.steps, " and saved; the same command goes on");
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
  check(state_.bad_steps == 0, "the last ", state_.bad_steps, " steps were not finite and are not saved; ", way_back());
  check_updated();
  say("finished ", options_.steps, " steps");
  return 0;
}

void TrainingRun::check_updated() const {
  check(state_.updates() > 0, "every one of the ", state_.step,
        " steps was skipped, so nothing was learned (log.txt in ", options_.run_dir,
        " says why of each); train on data with targets, in another run_dir");
}

std::string TrainingRun::way_back() const {
  if (saved_step_ < 0) return "there is no checkpoint of before, start again with a lower lr";
  if (saved_step_ >= state_.step - state_.bad_steps)
    return str("the checkpoint of step ", saved_step_, " has these weights, remove it and go on with a lower lr");
  return str("go on from the checkpoint of step ", saved_step_, " with a lower lr");
}

bool TrainingRun::stopping() {
  bool mine = stop_signal() != 0 || (options_.stop_after > 0 && steps_here_ >= options_.stop_after);
  if (options_.max_minutes > 0 && steps_here_ > 0)  // a session makes some progress
    mine |= seconds_since(start_) + longest_step_ + 2 * longest_save_ > options_.max_minutes * 60;
  const std::vector<char> all = world_.communicator().exchange(static_cast<char>(mine));
  return std::find(all.begin(), all.end(), char{true}) != all.end();
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
    check_replicas(*device_, *mesh_, weights.place(), weights.units(), static_cast<int>(options_.zero));
  }
  const double lr = learning_rate(options_, state_.step);
  const StepResult result = buffers_->step.run({batch.ids.data(), batch.labels.data(), batch.rows},
                                               static_cast<std::uint64_t>(options_.seed), state_.step, lr);
  const double seconds = seconds_since(begin);
  longest_step_ = std::max(longest_step_, seconds);
  if (trace_) trace_->step_done();
  report(result, seconds, lr);
  check(state_.bad_steps < options_.max_bad_steps, "step ", state_.step, ": loss or gradient was not finite in ",
        state_.bad_steps, " steps in a row (max_bad_steps); ", way_back());
}

void TrainingRun::report(const StepResult& result, double seconds, double lr) {
  const bool bad = result.outcome == StepResult::Outcome::not_finite;
  if (result.outcome == StepResult::Outcome::updated) {
    state_.clipped_steps += result.clip_coef < 1;
    state_.bad_steps = 0;
  } else {
    ++state_.skipped_steps;
    state_.bad_steps = bad ? state_.bad_steps + 1 : state_.bad_steps;
    say("step ", state_.step, " skipped: ",
        bad ? str("the gradient's norm is ", result.grad_norm, ", the loss ", result.loss)
            : std::string("every label is ignored"));
  }
  state_.samples += options_.global_batch;
  state_.seconds += seconds;
  const double rate = static_cast<double>(options_.global_batch * seq_len_) / seconds;
  const double mfu = rate * flops_per_token(config_, seq_len_).with_attention / peak_flops_;

  char hash[24];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(result.batch_hash));
  Json line = Json::object({{"step", state_.step},
                            {"loss", result.loss},
                            {"good_tokens", result.good_tokens},
                            {"batch_hash", hash},
                            {"grad_norm", result.grad_norm},
                            {"clip_coef", result.clip_coef},
                            {"lr", lr},
                            {"tokens_seen", state_.samples * seq_len_},
                            {"skipped_steps", state_.skipped_steps},
                            {"clipped_steps", state_.clipped_steps},
                            {"tokens_per_s", rate},
                            {"mfu", mfu},
                            {"seconds", state_.seconds}});
  if (layout_.world() > 1) {
    Json waits = Json::object();
    for (const Communicator* group : mesh_->groups()) {
      if (group->size() > 1) waits.set(group->name(), group->traffic().exposed_seconds());
    }
    line.set("exposed_wait", waits);
  }
  record(line);
  ++state_.step;
  ++steps_here_;
  const double left = static_cast<double>(options_.steps - state_.step) / static_cast<double>(steps_here_);
  if (log_)
    log_->progress(progress_text({state_.step, options_.steps, result.loss, result.grad_norm, lr, rate, mfu,
                                  left * seconds_since(start_)}),
                   due(options_.log_every));
}

bool TrainingRun::save() {
  const auto begin = std::chrono::steady_clock::now();
  Step& step = buffers_->step;
  ModelWeights& weights = buffers_->weights;
  CheckpointContents contents{
      state_, config_, weights.whole(weights.source()), {}, tokenizer_ ? tokenizer_->model() : std::string()};
  if (step.optimizer().has_moments())
    contents.moments = {weights.whole(step.moment_source(0)), weights.whole(step.moment_source(1))};
  try {
    // What this save would make superfluous may go before it.
    const std::string path =
        save_checkpoint(options_.run_dir, contents, world_.communicator(), [&] { prune(options_.keep_last - 1); });
    saved_step_ = state_.step;
    say("saved " + path);
  } catch (const Error& error) {
    say(brief("not saved at step ", state_.step, ": ", error.what()));
    record(Json::object({{"step", state_.step}, {"event", "save_failed"}, {"error", error.what()}}));
    return false;
  }
  prune(options_.keep_last);
  longest_save_ = std::max(longest_save_, seconds_since(begin));
  return true;
}

void TrainingRun::prune(std::int64_t keep_last) {
  if (world_.rank() != 0 || saved_step_ < 0) return;
  for (const std::string& warning : prune_checkpoints(options_.run_dir, saved_step_, keep_last, options_.keep_every))
    say(warning);
}

void TrainingRun::evaluate() {
  const auto stop = [&] { return !finished() && stopping(); };
  const EvalResult result =
      buffers_->evaluator.run(*val_, tokenizer_ ? &*tokenizer_ : nullptr, options_.eval_rows, stop);
  if (stop()) return;
  if (result.good_tokens == 0)
    return say("step ", state_.step, ": the held-out rows hold no target, so there is nothing to evaluate");
  Json line = Json::object(
      {{"step", state_.step}, {"event", "eval"}, {"loss", result.loss()}, {"perplexity", result.perplexity()}});
  if (result.bytes > 0) line.set("bits_per_byte", result.bits_per_byte());
  line.set("good_tokens", result.good_tokens);
  record(line);
  say("step ", state_.step, " held-out ", result.text());
  check(!finished() || std::isfinite(result.loss()), "the held-out loss after the last step is ", result.loss(), "; ",
        way_back());
}

void TrainingRun::write_sample() {
  const std::optional<std::vector<std::int32_t>> ids = generate(*buffers_->decoder, buffers_->weights.units(), prompt_,
                                                                tokenizer_->eot(), options_, options_.sample_tokens);
  if (!ids) return say("step ", state_.step, " sample: none, the model's logits are not finite");
  const std::string text = tokenizer_->decode(*ids);
  // JSON holds no bytes that are not UTF-8; Json::dump replaces them.
  record(
      Json::object({{"step", state_.step}, {"event", "sample"}, {"prompt", options_.sample_prompt}, {"text", text}}));
  say("step ", state_.step, " sample: ", options_.sample_prompt, "|", text);
}

}  // namespace onescale
