#include "train/trace.h"

#include <algorithm>
#include <chrono>
#include <iomanip>

#include "parallel/agreement.h"
#include "parallel/file.h"

namespace onescale {

Trace::Trace(const std::string& file, std::int64_t steps, Device& device, Mesh& mesh)
    : file_(file), left_(steps), device_(device), mesh_(mesh) {
  on_root(mesh.world, [&] { write_text(file_, "[]\n"); });
  mesh.world.barrier();  // clocks of ranks on different machines start together, as well as a barrier can
  start_ = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  device.trace([this](const Operation& o) { record(o.name, 0, o.begin, o.end); });
  for (Communicator* group : mesh.groups()) {
    group->on_wait([this, group](const char* operation, double started, double begin, double end) {
      const std::string name = group->name() + " " + operation;
      record(name, 1, begin, end);
      // Transfers overlap each other: a pair of events each, which viewers draw in rows of their own.
      ++transfers_;
      for (const auto& [phase, time] : {std::pair('b', std::max(started, start_)), std::pair('e', end)}) {
        events_ +=
            str(R"({"name":")", name, R"(","cat":"transfer","ph":")", phase, R"(","id":)", transfers_, R"(,"pid":)",
                mesh_.world.rank(), R"(,"tid":2,"ts":)", std::fixed, (time - start_) * 1e6, "},\n");
      }
    });
  }
}

void Trace::record(const std::string& name, int row, double begin, double end) {
  events_ += str(R"({"name":")", name, R"(","ph":"X","pid":)", mesh_.world.rank(), R"(,"tid":)", row, R"(,"ts":)",
                 std::fixed, (begin - start_) * 1e6, R"(,"dur":)", (end - begin) * 1e6, "},\n");
}

Trace::~Trace() {
  stop();
}

void Trace::stop() {
  device_.trace({});
  for (Communicator* group : mesh_.groups()) group->on_wait({});
}

void Trace::step_done() {
  if (left_ > 1)
    --left_;
  else
    finish();
}

void Trace::finish() {
  if (left_ == 0) return;
  left_ = 0;
  stop();
  std::vector<std::string> events(static_cast<std::size_t>(mesh_.world.size()));  // on rank 0: of every rank
  // Piece by piece, since every rank receives what rank 0 alone keeps, and a trace may be long.
  constexpr std::size_t piece = std::size_t{1} << 16;
  bool more = true;
  for (std::size_t at = 0; more; at += piece) {
    const std::vector<std::string> pieces =
        exchange_text(mesh_.world, events_.substr(std::min(at, events_.size()), piece));
    more = std::any_of(pieces.begin(), pieces.end(), [](const std::string& text) { return !text.empty(); });
    for (std::size_t rank = 0; mesh_.world.rank() == 0 && rank < pieces.size(); ++rank) events[rank] += pieces[rank];
  }
  std::string text = "[\n";
  for (std::size_t rank = 0; rank < events.size(); ++rank) {
    text += events[rank];
    for (const auto& [row, name] : {std::pair(0, "compute"), std::pair(1, "wait"), std::pair(2, "transfers")}) {
      text += str(R"({"name":"thread_name","ph":"M","pid":)", rank, R"(,"tid":)", row, R"(,"args":{"name":")", name,
                  "\"}},\n");
    }
  }
  on_root(mesh_.world, [&] { write_text(file_, text.substr(0, text.size() - 2) + "\n]\n"); });
}

}  // namespace onescale
