#include "parallel/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <sstream>

#include "kernels/error.h"
#include "parallel/agreement.h"
#include "parallel/mpi_job.h"

namespace onescale {

namespace {

// The variables of one launcher. A source counts where its rank and its size are there.
struct Source {
  const char *name, *rank, *size;
  bool mpi;
};

// SLURM_NTASKS would not do for Slurm: a batch shell, which is no task of a step, has it too.
constexpr Source sources[] = {{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", true},
                              {"PMIx", "PMIX_RANK", nullptr, true},
                              {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", false},
                              {"PMI", "PMI_RANK", "PMI_SIZE", false},
                              {"torchrun", "RANK", "WORLD_SIZE", false}};

std::string place(int rank, int world) {
  return world > 0 ? str("rank ", rank, " of ", world) : str("rank ", rank);
}

}  // namespace

Launch find_launch(const std::function<const char*(const char*)>& variable) {
  Launch found;
  const auto number = [&](const char* name) -> std::optional<int> {
    const char* text = variable(name);
    if (text == nullptr) return {};
    int value = 0;
    const char* end = text + std::strlen(text);
    const auto parsed = std::from_chars(text, end, value);
    if (parsed.ec == std::errc() && parsed.ptr == end && value >= 0) return value;
    if (found.problem.empty()) found.problem = str(name, " = '", text, "' is no number; unset it");
    return {};
  };
  for (const Source& s : sources) {
    if (variable(s.rank) == nullptr || (s.size != nullptr && variable(s.size) == nullptr)) continue;
    const std::optional<int> rank = number(s.rank), world = s.size == nullptr ? 0 : number(s.size);
    if (!rank || !world) continue;
    // mpirun within a Slurm job starts its daemons as a step, whose variables the ranks inherit.
    if (std::strcmp(s.name, "Slurm") == 0 && found.source.starts_with("Open MPI")) continue;
    if (found.source.empty()) {
      found.rank = *rank;
      found.world = *world;
      found.source = str(s.name, " (", s.rank, ")");
    } else if (*rank != found.rank || (*world != found.world && *world > 0 && found.world > 0)) {
      if (found.problem.empty()) {
        found.problem =
            str(found.source, " says ", place(found.rank, found.world), ", but ", s.name, " (", s.rank, ") says ",
                place(*rank, *world), "; unset the variables of the one that did not start this process");
      }
      continue;
    }
    found.world = std::max(found.world, *world);
    found.mpi = found.mpi || s.mpi;
  }
  if (found.problem.empty() && !found.mpi && found.world > 1) {
    found.problem = str(found.source, " says ", place(found.rank, found.world),
                        ", but MPI sees a single process; start the ranks with srun --mpi=pmix, or with mpirun");
  }
  return found;
}

World::World()
    : launch_(find_launch([](const char* name) { return std::getenv(name); })),  // NOLINT(concurrency-mt-unsafe)
      single_(make_single_communicator("world")) {}

World::~World() = default;

void World::open(std::int64_t largest_message) {
  check_usage(launch_.problem.empty(), launch_.problem);
  if (!launch_.mpi) return;
  mpi_ = std::make_unique<MpiJob>(largest_message);
  const Communicator& all = mpi_->communicator();
  if (launch_.world == 0) launch_.world = all.size();
  check_usage(all.rank() == launch_.rank && all.size() == launch_.world, launch_.source, " says ",
              place(launch_.rank, launch_.world), ", but MPI says ", place(all.rank(), all.size()),
              "; start the ranks with srun --mpi=pmix, or with the mpirun of the MPI that onescale is built with");
}

void World::stay_alone(const std::string& program) {
  check_usage(launch_.world <= 1 && launch_.rank == 0, program, " runs as one process, but ", launch_.source,
              " started several; start it without the launcher");
  launch_ = {};
}

Communicator& World::communicator() {
  return mpi_ ? mpi_->communicator() : *single_;
}

void World::set_timeout(double seconds) {
  if (mpi_) mpi_->timeout = seconds;
}

void World::set_step(std::int64_t step) {
  if (mpi_) mpi_->step = step;
}

void World::check_same(const std::string& what, const std::string& text) {
  const std::vector<std::string> texts = exchange_text(communicator(), text);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    std::istringstream first(texts[0]), other(texts[r]);
    std::string line, other_line;
    while (line == other_line && (first || other)) {
      line = other_line = "";
      std::getline(first, line);
      std::getline(other, other_line);
    }
    throw UsageError(str("the ranks differ in ", what, ": rank 0 has '", line, "', rank ", r, " '", other_line,
                         "'; start all with the same"));
  }
}

int World::run(const std::function<int()>& body) {
  try {
    const int code = body();
    if (mpi_) mpi_->finish();
    return code;
  } catch (const UsageError& error) {
    return fail(2, error.what());
  } catch (const std::bad_alloc&) {
    return fail(1, "no memory left; a smaller micro_batch or seq_len, or recompute = block, needs less");
  } catch (const std::filesystem::filesystem_error& error) {
    return fail(1, str(error.path1().string(), ": ", error.code().message(), "; check the path and its rights"));
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}

int World::fail(int code, const std::string& sentence) {
  if (mpi_ && mpi_->communicator().size() == launch_.world) {
    mpi_->fail(code, sentence);
  } else if (launch_.rank == 0) {
    std::fprintf(stderr, "onescale: %s\n", shortened(sentence).c_str());
  } else {
    sleep(1);  // a launcher may end rank 0 before its sentence when another rank leaves
  }
  return code;
}

}  // namespace onescale
