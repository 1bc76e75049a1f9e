// A model in a Hugging Face directory: config.json and model.safetensors, or model-*.safetensors with their index.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"
#include "parallel/communicator.h"
#include "parallel/parameter_table.h"

namespace onescale {

// Reading a model's weights. Names with and without "transformer." are accepted, the causal-mask buffers of old files
// are ignored, F64, F32, F16 and BF16 are converted to float. lm_head.weight may be absent when the head is tied; one
// that differs from wte.weight then is a warning. Throws naming every missing, unexpected or wrongly shaped tensor.
class ModelReader {
 public:
  ModelReader(const std::string& dir, const ModelConfig& config, const ParameterTable& table);

  // Elements [first, first + count) of the parameter at this position of the table.
  void read(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const;
  const std::vector<std::string>& warnings() const { return warnings_; }
  const SafetensorsReader& files() const { return files_; }

 private:
  SafetensorsReader files_;
  std::vector<const StoredTensor*> tensors_;  // in table order
  std::vector<std::string> warnings_;
};

// Fills `out` with the whole tensor at position wanted[rank] of a list, or nothing for -1. Every rank of a group calls
// it with the same list.
using Gather = std::function<void(const std::vector<std::int64_t>& wanted, float* out)>;

inline constexpr std::int64_t max_file_bytes = 5'000'000'000;
// Writes the tensors as DIR/STEM.safetensors, or as DIR/STEM-0000N-of-0000M.safetensors with an index: files of at most
// `limit` bytes, where a larger tensor has one of its own. They are dealt out over the ranks of `group`, at most one a
// rank, and 128 in all, unless `limit` asks for more; a rank has one tensor at a time in memory. Files are on the disk
// when it returns; the directory itself is not synced. Returns the checksums by name of the tensors that this rank
// wrote. Collective; a rank that cannot write throws Error after the others have had their tensors from it.
std::map<std::string, std::string> write_tensors(const std::string& dir, const std::string& stem,
                                                 const std::vector<StoredTensor>& tensors, const Gather& gather,
                                                 Communicator& group, std::int64_t limit = max_file_bytes);

// The tensors of a model's files, in table order.
std::vector<StoredTensor> model_tensors(const ParameterTable& table, FileType type);
// A directory that transformers loads: config.json, by rank 0, and the weights as F32 or BF16, as write_tensors.
// DIR must exist and hold no model.
std::map<std::string, std::string> write_model(const std::string& dir, const ModelConfig& config,
                                               const ParameterTable& table, const Gather& gather, FileType type,
                                               Communicator& group, std::int64_t limit = max_file_bytes);

}  // namespace onescale
