#include "model/hf_files.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>

#include "parallel/json.h"

namespace onescale {
namespace {

constexpr const char* head_name = "lm_head.weight";
constexpr const char* prefix = "transformer.";
constexpr std::size_t most_writers = 128;  // ranks that write at once: a reader holds a file of each open

// The name in the table of what a file calls `name`: files of the model without its head lack the prefix.
std::string full_name(const std::string& name) {
  return name == head_name || name.starts_with(prefix) ? name : prefix + name;
}

// Causal masks that old versions stored. The whole suffix counts: h.0.attn.c_attn.bias is a parameter.
bool is_mask(const std::string& full) {
  return full == "transformer.bias" || full.ends_with(".attn.bias") || full.ends_with(".attn.masked_bias");
}

bool readable(const StoredTensor& tensor) {
  return tensor.type <= FileType::BF16;
}

// Whether two tensors hold the same floats.
bool equal(const SafetensorsReader& files, const StoredTensor& a, const StoredTensor& b) {
  if (a.shape != b.shape) return false;
  constexpr std::int64_t piece = 1 << 18;
  std::vector<float> x(piece), y(piece);
  for (std::int64_t done = 0; done < a.numel(); done += piece) {
    const std::int64_t n = std::min(piece, a.numel() - done);
    files.read(a, done, n, x.data());
    files.read(b, done, n, y.data());
    if (std::memcmp(x.data(), y.data(), static_cast<std::size_t>(n) * sizeof(float)) != 0) return false;
  }
  return true;
}

// The tensors in files of at most `limit` bytes, in order: {file name, its tensors}.
std::vector<std::pair<std::string, std::vector<StoredTensor>>> split_files(const std::vector<StoredTensor>& tensors,
                                                                           const std::string& stem,
                                                                           std::int64_t limit) {
  std::vector<std::pair<std::string, std::vector<StoredTensor>>> files(1);
  std::int64_t bytes = 0;
  for (const StoredTensor& t : tensors) {
    if (bytes > 0 && bytes + t.bytes() > limit) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().second.push_back(t);
    bytes += t.bytes();
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    char part[64] = "";
    if (files.size() > 1) std::snprintf(part, sizeof part, "-%05zu-of-%05zu", i + 1, files.size());
    files[i].first = stem + part + ".safetensors";
  }
  return files;
}

}  // namespace

ModelReader::ModelReader(const std::string& dir, const ModelConfig& config, const ParameterTable& table)
    : files_(dir, "model") {
  std::map<std::string, const StoredTensor*> given;
  std::string missing, unexpected, wrong;
  const auto add = [](std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; };
  for (const StoredTensor& tensor : files_.tensors()) {
    const std::string full = full_name(tensor.name);
    check_contents(is_mask(full) || given.emplace(full, &tensor).second, dir, ": holds ", full,
                   " twice, with and without \"", prefix, "\"; keep one");
  }
  const auto head = config.tie_word_embeddings ? given.extract(head_name) : decltype(given)::node_type();
  for (const Parameter& p : table.parameters) {
    const auto found = given.extract(p.name);
    if (found.empty()) {
      add(missing, p.name);
      continue;
    }
    const StoredTensor& tensor = *tensors_.emplace_back(found.mapped());
    const StoredTensor expected{p.name, FileType::F32, p.shape};
    if (tensor.shape != p.shape || !readable(tensor)) add(wrong, tensor.describe() + " for " + expected.describe());
  }
  for (const auto& [name, tensor] : given) add(unexpected, tensor->name);
  check_contents(missing.empty() && unexpected.empty() && wrong.empty(), dir,
                 ": its tensors are not those of its config.json", missing.empty() ? "" : "; missing: " + missing,
                 unexpected.empty() ? "" : "; unexpected: " + unexpected,
                 wrong.empty() ? "" : "; of another shape or type: " + wrong);
  // The table of a tied model begins with the embedding.
  if (head.empty() || (readable(*head.mapped()) && equal(files_, *tensors_.front(), *head.mapped()))) return;
  warnings_.push_back(
      dir +
      ": lm_head.weight differs from transformer.wte.weight although config.json says tie_word_embeddings; it is not "
      "used (set tie_word_embeddings to false to use it)");
}

void ModelReader::read(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const {
  files_.read(*tensors_.at(parameter), first, count, out);
}

std::map<std::string, std::string> write_tensors(const std::string& dir, const std::string& stem,
                                                 const std::vector<StoredTensor>& tensors, const Gather& gather,
                                                 Communicator& group, std::int64_t limit) {
  std::int64_t total = 0;
  for (const StoredTensor& t : tensors) total += t.bytes();
  // The smallest files of which no writer has more than one, where `limit` allows that.
  const auto ranks = static_cast<std::size_t>(group.size());
  std::int64_t low = std::min(limit, (total + group.size() - 1) / group.size()), high = limit;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (split_files(tensors, stem, middle).size() <= std::min(ranks, most_writers))
      high = middle;
    else
      low = middle + 1;
  }
  const auto files = split_files(tensors, stem, high);
  struct Turn {  // a tensor that a rank writes, and its file
    std::int64_t tensor;
    std::size_t file;
  };
  std::vector<std::vector<Turn>> turns(ranks);
  Json map = Json::object();
  std::int64_t tensor = 0;
  for (std::size_t f = 0; f < files.size(); ++f) {
    // Spread over the group: neighbours may share a machine.
    std::vector<Turn>& mine = turns[files.size() < ranks ? f * ranks / files.size() : f % ranks];
    for (const StoredTensor& t : files[f].second) {
      mine.push_back({tensor++, f});
      map.set(t.name, files[f].first);
    }
  }
  std::size_t most = 0;
  for (const std::vector<Turn>& of_rank : turns) most = std::max(most, of_rank.size());

  const std::vector<Turn>& mine = turns[static_cast<std::size_t>(group.rank())];
  std::map<std::string, std::string> checksums;
  std::optional<SafetensorsWriter> writer;
  std::exception_ptr failure;  // kept until the others have had their tensors
  for (std::size_t turn = 0; turn < most; ++turn) {
    std::vector<std::int64_t> wanted;
    for (const std::vector<Turn>& of_rank : turns) wanted.push_back(turn < of_rank.size() ? of_rank[turn].tensor : -1);
    std::vector<float> values;
    if (turn < mine.size())
      values.resize(static_cast<std::size_t>(tensors[static_cast<std::size_t>(mine[turn].tensor)].numel()));
    gather(wanted, values.data());
    if (turn >= mine.size() || failure) continue;
    try {
      const std::size_t file = mine[turn].file;
      if (turn == 0 || mine[turn - 1].file != file)
        writer.emplace(str(dir, "/", files[file].first), files[file].second);
      writer->write(values.data(), std::ssize(values));
      if (turn + 1 < mine.size() && mine[turn + 1].file == file) continue;
      writer->close();
      checksums.insert(writer->checksums().begin(), writer->checksums().end());
    } catch (const Error&) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  if (files.size() > 1 && group.rank() == 0) {
    Json index_json = Json::object(), size = Json::object();
    size.set("total_size", total);
    index_json.set("metadata", size);
    index_json.set("weight_map", map);
    write_text(dir + "/" + stem + ".safetensors.index.json", index_json.dump(2) + "\n");
  }
  return checksums;
}

std::vector<StoredTensor> model_tensors(const ParameterTable& table, FileType type) {
  std::vector<StoredTensor> tensors;
  for (const Parameter& p : table.parameters) tensors.push_back({p.name, type, p.shape});
  return tensors;
}

std::map<std::string, std::string> write_model(const std::string& dir, const ModelConfig& config,
                                               const ParameterTable& table, const Gather& gather, FileType type,
                                               Communicator& group, std::int64_t limit) {
  auto checksums = write_tensors(dir, "model", model_tensors(table, type), gather, group, limit);
  if (group.rank() == 0) {
    write_text(dir + "/config.json", config_json(config, type == FileType::BF16 ? "bfloat16" : "float32"));
  }
  return checksums;
}

}  // namespace onescale
