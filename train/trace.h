// A trace of some steps in the format of Chrome's about:tracing and Perfetto.
#pragma once

#include <string>

#include "kernels/device.h"
#include "parallel/mesh.h"

namespace onescale {

// Records the operations of the device, the transfers of this rank's groups from their start until they are known to
// have ended, and the waits for them; a rank is a process of the trace, with a row each. The file is written by rank 0
// when the last step is done. Every rank of the mesh makes the same calls; each throws Error where the file cannot be
// written.
class Trace {
 public:
  // Recording begins at once, for `steps` steps.
  Trace(const std::string& file, std::int64_t steps, Device& device, Mesh& mesh);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void step_done();
  void finish();  // writes what there is, when the run ends before so many steps

 private:
  void stop();
  void record(const std::string& name, int row, double begin, double end);

  std::string file_;
  std::int64_t left_;
  Device& device_;
  Mesh& mesh_;
  std::int64_t transfers_ = 0;
  double start_ = 0;    // seconds of the steady clock
  std::string events_;  // JSON objects, each followed by a comma
};

}  // namespace onescale
