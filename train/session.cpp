#include "train/session.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iomanip>
#include <map>
#include <numeric>

#include "kernels/error.h"
#include "model/parameters.h"

namespace onescale {

Place Place::here() {
  Place here{};
  gethostname(here.host, sizeof here.host - 1);
  sched_getaffinity(0, sizeof here.cpus, &here.cpus);
  return here;
}

Options of_rank(Options options, Communicator& world) {
  if (options.threads > 0 || options.device == "cuda" || world.size() == 1) return options;
  // Ranks that the launcher has bound to CPUs of their own keep them; others share.
  const Place mine = Place::here();
  const std::vector<Place> all = world.exchange(mine);
  const auto sharing = std::count_if(all.begin(), all.end(), [&](const Place& place) {
    return place.host_name() == mine.host_name() && CPU_EQUAL(&place.cpus, &mine.cpus);
  });
  options.threads = std::max<std::int64_t>(1, available_threads() / sharing);
  return options;
}

double combined_peak(const std::vector<RankPeak>& ranks) {
  struct Host {
    cpu_set_t cpus{};
    std::int64_t threads = 0, ranks = 0;
    double of_a_core = 0;
  };
  std::map<std::string_view, Host> hosts;
  for (const RankPeak& rank : ranks) {
    Host& host = hosts[rank.place.host_name()];
    const std::int64_t own = std::min<std::int64_t>(rank.threads, CPU_COUNT(&rank.place.cpus));
    CPU_OR(&host.cpus, &host.cpus, &rank.place.cpus);
    host.threads += own, ++host.ranks;
    host.of_a_core += rank.flops / static_cast<double>(own);
  }
  double sum = 0;
  for (const auto& [name, host] : hosts)
    sum += host.of_a_core / static_cast<double>(host.ranks) *
           static_cast<double>(std::min<std::int64_t>(host.threads, CPU_COUNT(&host.cpus)));
  return sum;
}

std::string idle_cpus(const Options& options, const Launch& launch, Communicator& world) {
  if (!launch.source.starts_with("Open MPI")) return "";
  const std::vector<Place> all = world.exchange(Place::here());  // all ranks, whatever the options of each
  if (options.threads > 0) return "";
  cpu_set_t bound = all[0].cpus, launchers{};  // mpirun, the parent of its ranks, is not bound itself
  for (const Place& place : all) {
    if (place.host_name() == all[0].host_name()) CPU_OR(&bound, &bound, &place.cpus);
  }
  if (sched_getaffinity(getppid(), sizeof launchers, &launchers) != 0 || CPU_COUNT(&bound) >= CPU_COUNT(&launchers))
    return "";
  return str("mpirun has bound its ranks on ", all[0].host, " to ", CPU_COUNT(&bound), " of the ",
             CPU_COUNT(&launchers), " CPUs there; mpirun --bind-to none lets them use all");
}

Layout layout_of(const Options& options, const Communicator& world) {
  return make_layout(world.size(), world.rank(), static_cast<int>(options.sp), static_cast<int>(options.tp));
}

std::string identity(const Options& options) {
  const std::string program = read_text("/proc/self/exe");
  return str("version ", version, ", build ", checksum(program.data(), program.size()), "\n", print_config(options));
}

std::unique_ptr<Device> make_device(const Options& options, bool dry) {
  check_usage(options.device != "cuda", "device cuda: this build has no CUDA backend; use --device cpu");
  return make_cpu_device(static_cast<int>(options.threads), dry, options.isa);
}

DType parse_dtype(const std::string& name) {
  return name == "bfloat16" ? DType::bfloat16 : DType::float32;
}

ModelConfig config_from_options(const Options& o, std::int64_t tokenizer_size) {
  ModelConfig c;
  c.vocab_size = o.vocab_size ? o.vocab_size : tokenizer_size;
  c.n_positions = o.n_positions;
  c.n_embd = o.n_embd;
  c.n_layer = o.n_layer;
  c.n_head = o.n_head;
  c.n_inner = o.n_inner ? o.n_inner : 4 * o.n_embd;
  c.multi_query = o.multi_query;
  c.gelu = o.activation_function == "gelu" ? Gelu::erf : Gelu::tanh;
  c.scale_attn_weights = o.scale_attn_weights;
  c.layer_norm_epsilon = static_cast<float>(o.layer_norm_epsilon);
  c.initializer_range = static_cast<float>(o.initializer_range);
  c.embd_pdrop = static_cast<float>(o.embd_pdrop);
  c.resid_pdrop = static_cast<float>(o.resid_pdrop);
  c.attn_pdrop = static_cast<float>(o.attn_pdrop);
  c.tie_word_embeddings = o.tie_word_embeddings;
  c.bos_token_id = c.eos_token_id = -1;
  check_config(c, "the model's options");
  return c;
}

StepSettings step_settings(const Options& o, std::int64_t seq_len) {
  const Reduction reduction = o.reduction == "all_reduce"       ? Reduction::all_reduce
                              : o.reduction == "reduce_scatter" ? Reduction::reduce_scatter
                                                                : Reduction::ordered;
  StepSettings s;
  s.micro_batch = o.micro_batch;
  s.seq_len = seq_len;
  s.zero = {static_cast<int>(o.zero), {reduction, o.bucket_mb, parse_dtype(o.reduce_dtype)}, parse_dtype(o.dtype)};
  s.sp_mode = o.sp_mode == "gather_kv" ? SpMode::gather_kv : SpMode::ulysses;
  s.recompute = o.recompute == "light" ? Recompute::light : o.recompute == "block" ? Recompute::block : Recompute::none;
  s.optimizer = {o.optimizer == "adamw", static_cast<float>(o.beta1), static_cast<float>(o.beta2),
                 static_cast<float>(o.eps), static_cast<float>(o.weight_decay)};
  s.clip_norm = o.clip_norm;
  return s;
}

std::optional<Tokenizer> tokenizer_in(const std::string& dir) {
  const std::string file = dir + "/tokenizer.model";
  if (!std::filesystem::exists(file)) return std::nullopt;
  return Tokenizer::load(file);
}

ModelSource::ModelSource(const std::string& path) : dir_(path) {
  namespace fs = std::filesystem;
  const auto warn = [](const std::vector<std::string>& warnings) {
    for (const std::string& warning : warnings)
      std::fprintf(stderr, "onescale: warning: %s\n", shortened(warning).c_str());
  };
  check(fs::is_directory(path), "model ", path,
        " is not a directory; give a Hugging Face directory, a checkpoint or a run directory");
  if (!fs::exists(fs::path(path) / "config.json") && fs::is_directory(fs::path(path) / "checkpoints")) {
    const FoundCheckpoint found = find_checkpoint(path, *make_single_communicator("world"));
    check(found.checkpoint.has_value(), "run directory ", path, " has no checkpoint yet");
    warn(found.warnings);
    dir_ = found.checkpoint->path();
  }
  config_ = read_config((fs::path(dir_) / "config.json").string());
  table_ = gpt_bigcode_table(config_);
  reader_ = std::make_unique<ModelReader>(dir_, config_, table_);
  warn(reader_->warnings());
}

void ModelSource::read(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const {
  reader_->read(parameter, first, count, out);
  const float* const bad = std::find_if_not(out, out + count, [](float x) { return std::isfinite(x); });
  check(bad == out + count, dir_, ": ", table_.parameters[parameter].name, " holds ", *bad, " at element ",
        first + (bad - out), ", so the model is damaged; take another, or an older checkpoint of its run");
}

std::unique_ptr<Device> planned_device(const Options& options, const Layout& layout,
                                       const std::function<void(Device&, Mesh&)>& work, std::string* memory) {
  const std::unique_ptr<Mesh> groups = Mesh::recording(layout);
  const std::unique_ptr<Device> dry = make_device(options, true);
  work(*dry, *groups);
  std::unique_ptr<Device> device = make_device(options, false);
  device->reserve_scratch(dry->memory()[static_cast<std::size_t>(Kind::kernel_scratch)]);
  if (memory) *memory = memory_table(*dry);
  return device;
}

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit ? 2 : 0) << bytes << " " << units[unit];
  return out.str();
}

std::string memory_table(const Device& device) {
  const auto memory = device.memory();
  std::ostringstream out;
  const auto row = [&](const char* name, std::int64_t bytes) {
    out << "  " << std::left << std::setw(16) << name << std::right << std::setw(12)
        << bytes_text(static_cast<double>(bytes)) << "\n";
  };
  for (std::size_t kind = 0; kind < memory.size(); ++kind) row(name_of(static_cast<Kind>(kind)), memory[kind]);
  row("together", std::accumulate(memory.begin(), memory.end(), std::int64_t{0}));
  return out.str();
}

FlopsPerToken flops_per_token(const ModelConfig& c, std::int64_t seq_len) {
  const double n = static_cast<double>(c.parameters() - c.n_positions * c.n_embd -
                                       (c.tie_word_embeddings ? 0 : c.vocab_size * c.n_embd));
  return {6 * n, 6 * n + 6.0 * static_cast<double>(c.n_layer * c.n_embd) * static_cast<double>(seq_len)};
}

}  // namespace onescale
