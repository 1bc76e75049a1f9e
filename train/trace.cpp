#include "train/trace.h"

#include <algorithm>
#include <chrono>
#include <iomanip>

#include "parallel/agreement.h"
#include "parallel/file.h"

namespace onescale {

namespace {

// Every rank's text, by rank, on rank 0 alone: a trace may be long.
std::vector<std::string> collect(Communicator& world, std::string mine) {
  constexpr std::int64_t word = 4;
  mine.resize((mine.size() + word - 1) / word * word, '\n');
  std::vector<std::string> texts;
  std::vector<Tensor> out, in;
  for (const std::size_t size : world.exchange(mine.size())) texts.emplace_back(world.rank() == 0 ? size : 0, '\0');
  const auto words = [](std::string& text) {
    return Tensor(text.data(), DType::int32, {static_cast<std::int64_t>(text.size()) / word});
  };
  std::string nothing;
  for (std::string& text : texts) {
    out.push_back(words(text));
    in.push_back(words(in.empty() ? mine : nothing));
  }
  world.all_to_all(out, in)->wait();
  return texts;
}

}  // namespace

Trace::Trace(const std::string& file, std::int64_t steps, Device& device, Mesh& mesh)
    : file_(file), left_(steps), device_(device), mesh_(mesh) {
  on_root(mesh.world, [&] { write_text(file_, "[]\n"); });
  mesh.world.barrier();  // clocks of ranks on different machines start together, as well as a barrier can
  start_ = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  device.trace([this](const char* name, double begin, double end) { record(name, 0, begin, end); });
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
  const std::vector<std::string> all = collect(mesh_.world, std::move(events_));
  on_root(mesh_.world, [&] {
    std::string text = "[\n";
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      text += all[rank];
      for (const auto& [row, name] : {std::pair(0, "compute"), std::pair(1, "wait"), std::pair(2, "transfers")}) {
        text += str(R"({"name":"thread_name","ph":"M","pid":)", rank, R"(,"tid":)", row, R"(,"args":{"name":")", name,
                    "\"}},\n");
      }
    }
    write_text(file_, text.substr(0, text.size() - 2) + "\n]\n");
  });
}

}  // namespace onescale
