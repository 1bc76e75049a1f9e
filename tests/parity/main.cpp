// parity_test [slow | GROUP ...] [stop]: the trainer on many layouts, set beside one process and numbers from outside.
// All jobs of one number of ranks run at once, on as many groups as there are room for. GROUP: these alone, by the
// names below; slow: the whole grid; stop: end at the first difference.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "parallel/launch.h"
#include "tests/parity/jobs.h"

namespace onescale::parity {
namespace {

void run_all(Communicator& world, const Jobs& jobs, Report& report) {
  for (int ranks = world.size(); ranks >= 1; --ranks) {
    std::vector<const Job*> mine;
    const int groups = world.size() / ranks, at = world.rank() / ranks;
    int count = 0;
    for (const Job& job : jobs) {
      if (job.ranks == ranks && count++ % groups == at) mine.push_back(&job);
    }
    if (mine.empty()) continue;
    std::vector<int> members(static_cast<std::size_t>(ranks));
    std::iota(members.begin(), members.end(), at * ranks);
    const std::unique_ptr<Communicator> group =
        ranks == 1 ? make_single_communicator("world") : world.split(members, "world");
    for (const Job* job : mine) job->run(*group, report);
  }
}

}  // namespace
}  // namespace onescale::parity

int main(int argc, char** argv) {
  using namespace onescale;
  using namespace onescale::parity;
  const auto given = [&](const char* word) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], word) == 0) return true;
    }
    return false;
  };
  World world;
  return world.run([&] {
    world.open();
    world.set_timeout(given("stop") ? 20 : 120);
    Report report(given("stop"));
    Jobs jobs;
    const std::pair<const char*, void (*)(Jobs&)> groups[] = {{"broken", add_broken_ranks},
                                                              {"odd", add_odd_sizes},
                                                              {"golden", add_golden},
                                                              {"bits", add_bits},
                                                              {"long", add_long_run},
                                                              {"chunks", add_chunks},
                                                              {"wire", add_wire},
                                                              {"plain", add_plain},
                                                              {"evaluation", add_evaluation},
                                                              {"grid", [](Jobs& all) { add_grid(all, false); }},
                                                              {"slow", [](Jobs& all) { add_grid(all, true); }}};
    const bool some =
        std::any_of(std::begin(groups), std::end(groups), [&](auto& group) { return given(group.first); });
    for (const auto& [name, add] : groups)
      if (some ? given(name) : std::strcmp(name, "slow") != 0) add(jobs);
    run_all(world.communicator(), jobs, report);
    std::int64_t comparisons = 0, failures = 0;
    for (const std::int64_t n : world.communicator().exchange(report.comparisons)) comparisons += n;
    for (const std::int64_t n : world.communicator().exchange(report.failures)) failures += n;
    if (world.rank() == 0) {
      std::printf("parity: %zu jobs on up to %d ranks, %lld comparisons, %lld differ\n", jobs.size(),
                  world.communicator().size(), static_cast<long long>(comparisons), static_cast<long long>(failures));
    }
    return failures == 0 ? 0 : 1;
  });
}
