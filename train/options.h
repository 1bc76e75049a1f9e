// Every option of the program: a plain member with its default here, one row of the table in options_table.cpp. The
// command line, configuration files, --help, --print_config and the comparison at a resume are all made from that
// table.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace onescale {

inline constexpr const char* version = "0.1.0";

// Names are those of the options; 0 and "" mean what the table's help text says. Numbers are within the table's ranges
// once parsed.
struct Options {
  std::string command;             // argv[1]
  char letter = 0;                 // of the command, as in the table
  std::vector<std::string> given;  // names set by a file or the command line, sorted: tells a default from a choice
  bool has(const std::string& name) const;

  // the model's sizes, as in config.json
  std::int64_t vocab_size = 0, n_positions = 1024, n_embd = 768, n_layer = 12, n_head = 12, n_inner = 0;
  bool multi_query = true;
  std::string activation_function = "gelu_pytorch_tanh";
  double layer_norm_epsilon = 1e-5, initializer_range = 0.02;
  bool scale_attn_weights = true, tie_word_embeddings = true;
  double embd_pdrop = 0.1, resid_pdrop = 0.1, attn_pdrop = 0.1;

  // the run
  std::string run_dir, data, model;
  std::int64_t seed = 1, steps = 1000, seq_len = 0, global_batch = 32, micro_batch = 8;
  std::string recompute = "none", dtype = "float32", device = "auto", isa = "auto";
  std::int64_t threads = 0;

  // the layout over ranks
  std::int64_t sp = 1, tp = 1, zero = 1, world = 1;
  std::string sp_mode = "ulysses", reduction = "ordered", reduce_dtype = "float32";
  double bucket_mb = 16, comm_timeout = 600;
  std::int64_t check_replicas = 100, trace_steps = 3;
  std::string trace;

  // the optimizer
  std::string optimizer = "adamw", schedule = "cosine";
  double lr = 3e-4, min_lr = 3e-5;
  std::int64_t warmup_steps = 100, decay_steps = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip_norm = 1.0;
  std::int64_t max_bad_steps = 10;

  // the training loop
  std::int64_t eval_every = 250, eval_rows = 160, sample_every = 0, sample_tokens = 64;
  std::string sample_prompt;
  std::int64_t save_every = 500, keep_last = 3, keep_every = 0, log_every = 10, stop_after = 0;
  double max_minutes = 0;

  // prepare
  std::vector<std::string> input, pattern = {"*"};
  std::string out, tokenizer;
  double val_share = 0.01, fim_rate = 0, fim_spm_rate = 0.5;
  std::int64_t fim_bytes = 0;
  std::int64_t tokenizer_mb = 64, shard_tokens = 100'000'000;

  // eval, generate, gradients
  std::string split = "val";
  std::string prompt, prompt_file, suffix;
  bool infill = false;
  std::int64_t max_new_tokens = 128, top_k = 0;
  double temperature = 0.8, top_p = 1;
  std::string batch, against;
  bool logits = false;
};

// One row of the table.
struct Option {
  using Member = std::variant<std::int64_t Options::*, double Options::*, bool Options::*, std::string Options::*,
                              std::vector<std::string> Options::*>;
  const char* name;
  Member member;
  // Letters of the commands that have it, a capital where it must be given; "!": fixed for the life of a run; "/": the
  // path of a directory.
  std::string_view commands;
  const char* help;
  double min = 0, max = std::numeric_limits<double>::infinity();  // of a number, both included
  const char* choices = "";                                       // of a text: "a|b|c", empty for any
  std::string_view group = {};                                    // of the help text and the printed file

  template <class T>
  bool is() const {
    return std::holds_alternative<T Options::*>(member);
  }
  bool belongs(char letter) const;
  bool required(char letter) const;
  bool fixed() const { return commands.ends_with('!'); }
  bool directory() const { return commands.find('/') != std::string_view::npos; }
};
const std::vector<Option>& option_table();
inline constexpr std::string_view sizes_group = "Model sizes";  // those that a model read from a directory has itself
const Option* find_option(const std::string& name);             // nullptr: there is none

struct Command {
  const char* name;
  char letter;
  const char* help;
};
const std::vector<Command>& commands();

// What the command line asks for. `text` is not empty when it is to be printed and the program ends with `exit_code`:
// --help, --version, --print_config, or no command at all.
struct Parsed {
  Options options;
  std::string text;
  int exit_code = 0;
};

// Command line > later --config > earlier --config > default. Throws UsageError for an unknown command, option or key
// (naming the nearest), a value of the wrong type or out of range, an option that is missing, and settings that
// contradict each other.
Parsed parse(int argc, const char* const* argv);

// A TOML file of the command's options that gives the same run.
std::string print_config(const Options& options);

// Name and text of the command's options, in table order; what trainer.json keeps.
using Flat = std::vector<std::pair<std::string, std::string>>;
Flat flat(const Options& options);

// The differences between the options of a checkpoint and those of now; names that one of the two lacks are passed
// over, and so are two paths of one directory.
struct Change {
  std::string name, before, after;
  bool fixed;
};
std::vector<Change> changed(const Flat& before, const Flat& now);

// What the table gives to the command line and to files.
Options defaults(const Command& command);
// Sets one option from its texts; `where` begins the sentence of an error: "run.toml:3", "command line".
void set_option(Options& options, const Option& option, const std::vector<std::string>& texts,
                const std::string& where);
std::string text_of(const Options& options, const Option& option, bool toml);         // as typed, or as a TOML value
std::string nearest(const std::string& name, const std::vector<std::string>& names);  // by edit distance
// What one value by itself does not show: options that must be given, batches that divide, schedules that fit.
void check_options(const Options& options);

}  // namespace onescale
