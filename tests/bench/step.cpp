// Times the trainer's own step on one random batch and prints one JSON line; with --profile 1 also a table of the
// operations on stderr: the share of each in the step, and how near it is to what bounds it, its arithmetic or its
// memory traffic. Arguments are pairs of --name and an integer: the names of `sizes` below.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>

#include "kernels/error.h"
#include "parallel/json.h"
#include "train/session.h"

namespace {

using namespace onescale;

using Sizes = std::map<std::string, std::int64_t>;

Sizes parse_sizes(int argc, char** argv) {
  Sizes sizes = {{"vocab_size", 50304}, {"n_layer", 12}, {"n_head", 12},     {"n_embd", 768},  {"multi_query", 1},
                 {"seq_len", 256},      {"rows", 4},     {"micro_batch", 0}, {"steps", 5},     {"warmup", 2},
                 {"threads", 0},        {"profile", 0},  {"bfloat16", 0},    {"recompute", 0}, {"ignored", 0}};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = std::string(argv[i]).substr(std::min<std::size_t>(2, std::string(argv[i]).size()));
    check_usage(sizes.contains(name) && i + 1 < argc, argv[i], " is no argument of step_bench, or has no value");
    sizes[name] = std::stoll(argv[i + 1]);
  }
  if (sizes["micro_batch"] == 0) sizes["micro_batch"] = sizes["rows"];
  return sizes;
}

void print_profile(Device& device, std::int64_t steps) {
  const double peak_flops = device.peak_flops(), peak_bandwidth = device.peak_bandwidth();
  double total = 0;
  for (const auto& [name, work] : device.work()) total += work.seconds;
  std::fprintf(stderr, "peak %.0f GFLOP/s, %.1f GB/s\n", peak_flops / 1e9, peak_bandwidth / 1e9);
  std::fprintf(stderr, "%-24s %7s %9s %7s %9s %8s %8s %s\n", "operation", "calls", "ms/step", "share", "bound ms",
               "of bound", "GFLOP/s", "bound by");
  auto work = device.work();
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
}

int run(int argc, char** argv) {
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
  options.micro_batch = sizes["micro_batch"];
  options.dtype = sizes["bfloat16"] != 0 ? "bfloat16" : "float32";
  options.recompute = std::vector{"none", "light", "block"}.at(static_cast<std::size_t>(sizes["recompute"]));
  const StepSettings settings = step_settings(options, T);

  const auto mesh = Mesh::single();
  const auto device = planned_device(options, mesh->layout, [&](Device& dry, Mesh& groups) {
    ModelWeights weights(dry, groups, config, settings.zero);
    Step(weights, settings).run_empty();
  });
  ModelWeights weights(*device, *mesh, config, settings.zero);
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

  double best = 1e9, first = 0, last = 0;
  std::vector<double> seconds;
  for (std::int64_t i = -sizes["warmup"]; i < steps; ++i) {
    if (i == 0) device->reset_work(sizes["profile"] != 0);
    const auto start = std::chrono::steady_clock::now();
    last = step.run({ids.data(), labels.data(), rows}, 1, i, 3e-4).loss;
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
  std::printf("%s\n", out.dump().c_str());
  if (sizes["profile"] != 0) print_profile(*device, steps);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
