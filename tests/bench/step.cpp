// Times the trainer's own step on one random batch and prints one JSON line; with --profile 1 also a table of the
// operations on stderr: the share of each in the step, and how near it is to what bounds it, its arithmetic or its
// memory traffic. Under mpirun the rows are shared by all ranks, and one more table shows the collectives. Arguments
// are pairs of --name and an integer: the names of `sizes` below.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>

#include "kernels/error.h"
#include "parallel/json.h"
#include "parallel/launch.h"
#include "train/layout_check.h"
#include "train/session.h"

namespace {

using namespace onescale;

using Sizes = std::map<std::string, std::int64_t>;

Sizes parse_sizes(int argc, char** argv) {
  Sizes sizes = {{"vocab_size", 50304},
                 {"n_layer", 12},
                 {"n_head", 12},
                 {"n_embd", 768},
                 {"multi_query", 1},
                 {"seq_len", 256},
                 {"rows", 4},
                 {"micro_batch", 0},
                 {"steps", 5},
                 {"warmup", 2},
                 {"threads", 0},
                 {"profile", 0},
                 {"bfloat16", 0},
                 {"recompute", 0},
                 {"ignored", 0},
                 {"sp", 1},
                 {"tp", 1},
                 {"zero", 0},
                 {"reduction", 0},
                 {"bucket_mb", 16},
                 {"gather_kv", 0},
                 {"isa", 0}};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = std::string(argv[i]).substr(std::min<std::size_t>(2, std::string(argv[i]).size()));
    check_usage(sizes.contains(name) && i + 1 < argc, argv[i], " is no argument of step_bench, or has no value");
    sizes[name] = std::stoll(argv[i + 1]);
  }

  return sizes;
}

// What the calls of one operation took together.
struct Work {
  std::int64_t calls = 0;
  double seconds = 0, flops = 0, bytes = 0;
};

// Returns the seconds that a step would take if each operation reached its bound.
double print_profile(Device& device, DType dtype, const std::map<std::string, Work>& by_name, std::int64_t steps) {
  const double peak_flops = device.peak_flops(dtype), peak_bandwidth = device.peak_bandwidth();
  double total = 0;
  for (const auto& [name, work] : by_name) total += work.seconds;
  std::fprintf(stderr, "peak %.0f GFLOP/s, %.1f GB/s\n", peak_flops / 1e9, peak_bandwidth / 1e9);
  std::fprintf(stderr, "%-24s %7s %9s %7s %9s %8s %8s %s\n", "operation", "calls", "ms/step", "share", "bound ms",
               "of bound", "GFLOP/s", "bound by");
  std::vector<std::pair<std::string, Work>> work(by_name.begin(), by_name.end());
  std::stable_sort(work.begin(), work.end(),
                   [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  const double to_ms = 1e3 / static_cast<double>(steps);
  double bounds = 0;
  for (const auto& [name, w] : work) {
    const double by_flops = w.flops / peak_flops, by_bytes = w.bytes / peak_bandwidth,
                 bound = std::max(by_flops, by_bytes);
    bounds += bound;
    std::fprintf(stderr, "%-24s %7.0f %9.3f %6.1f%% %9.3f %8.2f %8.0f %s\n", name.c_str(),
                 static_cast<double>(w.calls) / static_cast<double>(steps), w.seconds * to_ms, 100 * w.seconds / total,
                 bound * to_ms, bound / w.seconds, w.flops / w.seconds / 1e9,
                 by_flops > by_bytes ? "arithmetic" : "memory");
  }
  std::fprintf(stderr, "%-24s %7s %9.3f %6.1f%% %9.3f %8.2f\n", "all operations", "", total * to_ms, 100.0,
               bounds * to_ms, bounds / total);
  return bounds / static_cast<double>(steps);
}

// Calls, bytes and seconds of waiting a step, by group and operation.
void print_traffic(Mesh& mesh, std::int64_t steps) {
  std::fprintf(stderr, "%-8s %-16s %7s %9s %9s %12s\n", "group", "collective", "calls", "MB sent", "wait ms",
               "ms a call");
  const auto n = static_cast<double>(steps);
  for (const Communicator* group : mesh.groups()) {
    for (const auto& [name, count] : group->traffic().operations) {
      if (group->size() == 1) continue;
      const auto calls = static_cast<double>(count.calls);
      std::fprintf(stderr, "%-8s %-16s %7.1f %9.2f %9.3f %12.4f\n", group->name().c_str(), name.c_str(), calls / n,
                   static_cast<double>(count.bytes) / 1e6 / n, count.seconds * 1e3 / n, count.seconds * 1e3 / calls);
    }
  }
}

int run(int argc, char** argv, World& world) {
  Sizes sizes = parse_sizes(argc, argv);
  const std::int64_t rows = sizes["rows"], T = sizes["seq_len"], steps = sizes["steps"];
  ModelConfig config;
  config.vocab_size = sizes["vocab_size"];
  config.n_layer = sizes["n_layer"];
  config.n_head = sizes["n_head"];
  config.n_embd = sizes["n_embd"];
  config.n_inner = 4 * config.n_embd;
  config.n_positions = T;
  config.multi_query = sizes["multi_query"] != 0;
  config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0;
  config.bos_token_id = config.eos_token_id = -1;
  check_config(config, "step_bench");
  Options options;
  options.threads = sizes["threads"];
  if (sizes["isa"] != 0) options.isa = str("v", sizes["isa"]);
  options.dtype = sizes["bfloat16"] != 0 ? "bfloat16" : "float32";
  options.recompute = std::vector{"none", "light", "block"}.at(static_cast<std::size_t>(sizes["recompute"]));
  options.sp = sizes["sp"], options.tp = sizes["tp"], options.zero = sizes["zero"];
  options.sp_mode = sizes["gather_kv"] != 0 ? "gather_kv" : "ulysses";
  options.reduction =
      std::vector{"ordered", "reduce_scatter", "all_reduce"}.at(static_cast<std::size_t>(sizes["reduction"]));
  options.bucket_mb = static_cast<double>(sizes["bucket_mb"]);
  StepSettings settings = step_settings(options, T);

  Communicator& all = world.communicator();
  const Layout layout = make_layout(all.size(), all.rank(), static_cast<int>(options.sp), static_cast<int>(options.tp));
  settings.micro_batch = sizes["micro_batch"] > 0 ? sizes["micro_batch"] : std::max<std::int64_t>(1, rows / layout.dp);
  check_layout(config, T, layout, options.sp_mode);
  check_batch(rows, settings.micro_batch, layout);
  const auto device = planned_device(options, layout, [&](Device& dry, Mesh& groups) {
    ModelWeights weights(dry, groups, config, settings.zero);
    Step(weights, settings).run_empty(rows / layout.dp / settings.micro_batch);
  });
  Mesh mesh(all, layout);
  ModelWeights weights(*device, mesh, config, settings.zero);
  weights.initialise(1);
  Step step(weights, settings);

  // Every position has a target, that of the position after it; the last one's is of its own.
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * T)), labels(ids.size());
  std::uint64_t state = 1234;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto next = [&] {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(config.vocab_size));
    };
    ids[i] = next();
    if (i > 0) labels[i - 1] = ids[i];
    if ((i + 1) % static_cast<std::size_t>(T) == 0) labels[i] = next();
  }
  // A prompt of `ignored` percent of each row.
  for (std::int64_t i = 0; i < rows * T; ++i) {
    if (i % T < sizes["ignored"] * T / 100) labels[static_cast<std::size_t>(i)] = -100;
  }

  std::map<std::string, Work> work;
  double best = 1e9, first = 0, last = 0;
  std::vector<double> seconds;
  for (std::int64_t i = -sizes["warmup"]; i < steps; ++i) {
    if (i == 0) {
      if (sizes["profile"] != 0) {
        device->trace([&](const Operation& o) {
          Work& w = work[o.name];
          ++w.calls, w.seconds += o.end - o.begin, w.flops += o.flops, w.bytes += o.bytes;
        });
      }
      for (Communicator* group : mesh.groups()) group->reset_traffic();
    }
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t share = rows / layout.dp, at = layout.dp_rank() * share * T;
    last = step.run({ids.data() + at, labels.data() + at, share}, 1, i, 3e-4).loss;
    const double time = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i == -sizes["warmup"]) first = last;
    if (i >= 0) seconds.push_back(time);
  }
  std::sort(seconds.begin(), seconds.end());
  best = seconds.front();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double tokens = static_cast<double>(rows * T), flops = flops_per_token(config, T).with_attention;
  Json out = Json::object();
  out.set("tokens_per_s_max", tokens / best);
  out.set("tokens_per_s_median", tokens / seconds[seconds.size() / 2]);
  out.set("step_s_min", best);
  out.set("gflops_max", flops * tokens / best / 1e9);
  out.set("peak_rss_mib", static_cast<std::int64_t>(usage.ru_maxrss / 1024));
  out.set("loss_first", first);
  out.set("loss_last", last);
  out.set("parameters", config.parameters());
  if (all.rank() != 0) return 0;
  if (sizes["profile"] != 0) out.set("bound_s", print_profile(*device, parse_dtype(options.dtype), work, steps));
  std::printf("%s\n", out.dump().c_str());
  if (sizes["profile"] != 0 && all.size() > 1) print_traffic(mesh, steps);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  World world;
  return world.run([&] {
    world.open();
    return run(argc, argv, world);
  });
}
