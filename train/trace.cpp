#include "train/trace.h"

#include <chrono>
#include <cstdio>

#include "parallel/file.h"
#include "parallel/agreement.h"

namespace onescale {

Trace::Trace(const std::string& file, std::int64_t steps, Device& device, Mesh& mesh)
    : file_(file), left_(steps), device_(device), mesh_(mesh) {
  mesh.world.barrier();  // clocks of ranks on different machines start together, as well as a barrier can
  start_ = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  const auto record = [this](const std::string& name, int row, double begin, double end) {
    char text[256];
    std::snprintf(text, sizeof text, R"({"name":"%s","ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f},)", name.c_str(),
                  mesh_.world.rank(), row, (begin - start_) * 1e6, (end - begin) * 1e6);
    events_ += text;
    events_ += '\n';
  };
  device.trace([record](const char* name, double begin, double end) { record(name, 0, begin, end); });
  for (Communicator* group : mesh.groups()) {
    group->on_wait([record, group](const char* name, double begin, double end) {
      record(group->name() + " " + name, 1, begin, end);
    });
  }
}

Trace::~Trace() {
  stop();
}

void Trace::stop() {
  device_.trace({});
  for (Communicator* group : mesh_.groups()) group->on_wait({});
}

void Trace::step_done() {
  if (left_ == 0 || --left_ > 0) return;
  stop();
  const std::vector<std::string> all = exchange_text(mesh_.world, events_);
  on_root(mesh_.world, [&] {
    std::string text = "[\n";
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      text += all[rank];
      for (const auto& [row, name] : {std::pair(0, "compute"), std::pair(1, "wait")}) {
        text += str(R"({"name":"thread_name","ph":"M","pid":)", rank, R"(,"tid":)", row, R"(,"args":{"name":")", name,
                    "\"}},\n");
      }
    }
    write_text(file_, text.substr(0, text.size() - 2) + "\n]\n");
  });
}

}  // namespace onescale
