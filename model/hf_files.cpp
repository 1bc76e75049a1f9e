#include "model/hf_files.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <set>

#include "parallel/json.h"

namespace onescale {
namespace {

constexpr const char* head_name = "lm_head.weight";
constexpr const char* prefix = "transformer.";

// The name in the table of what a file calls `name`: files of the model without its head lack the prefix.
std::string full_name(const std::string& name) {
  return name == head_name || name.starts_with(prefix) ? name : prefix + name;
}

// Causal masks that old versions stored. The whole suffix counts: h.0.attn.c_attn.bias is a parameter.
bool is_mask(const std::string& full) {
  return full == "transformer.bias" || full.ends_with(".attn.bias") || full.ends_with(".attn.masked_bias");
}

bool readable(const StoredTensor& tensor) {
  return tensor.type == FileType::F32 || tensor.type == FileType::BF16 || tensor.type == FileType::F16 ||
         tensor.type == FileType::F64;
}

// Whether two tensors hold the same floats.
bool equal(const SafetensorsSet::Entry& a, const SafetensorsSet::Entry& b) {
  if (a.second->shape != b.second->shape) return false;
  constexpr std::int64_t piece = 1 << 18;
  std::vector<float> x(piece), y(piece);
  for (std::int64_t done = 0; done < a.second->numel(); done += piece) {
    const std::int64_t n = std::min(piece, a.second->numel() - done);
    a.first->read(*a.second, done, n, x.data());
    b.first->read(*b.second, done, n, y.data());
    if (std::memcmp(x.data(), y.data(), static_cast<std::size_t>(n) * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace

SafetensorsSet::SafetensorsSet(const std::string& dir, const std::string& stem) : dir_(dir) {
  const std::string single = dir + "/" + stem + ".safetensors", index = single + ".index.json";
  std::set<std::string> names;
  std::error_code ignored;
  const bool one = std::filesystem::exists(single, ignored);
  if (!one && std::filesystem::exists(index, ignored)) {
    const Json map = Json::read_file(index).at("weight_map");
    for (const std::string& tensor : map.keys()) {
      const std::string name = map.at(tensor).string();
      check_contents(!name.empty() && name.find('/') == std::string::npos, index, ": tensor ", tensor,
                     " is said to be in \"", name, "\", which is no file name of its directory; write the index anew");
      names.insert(name);
    }
  } else {
    check_contents(one, dir, ": has neither ", stem, ".safetensors nor ", stem,
                   ".safetensors.index.json; give a model saved by save_pretrained as safetensors");
    names.insert(stem + ".safetensors");
  }
  for (const std::string& name : names) {
    files_.push_back(std::make_unique<SafetensorsFile>(str(dir, "/", name)));
    for (const StoredTensor& t : files_.back()->tensors()) {
      check_contents(entries_.emplace(t.name, Entry(files_.back().get(), &t)).second, files_.back()->path(),
                     ": tensor ", t.name, " is also in another file of the model; keep one");
    }
  }
}

SafetensorsSet::Entry SafetensorsSet::at(const std::string& name) const {
  const auto found = entries_.find(name);
  check_contents(found != entries_.end(), dir_, ": none of its files has the tensor ", name, "; get the files anew");
  return found->second;
}

ModelReader::ModelReader(const std::string& dir, const ModelConfig& config, const ParameterTable& table)
    : set_(dir, "model") {
  std::map<std::string, SafetensorsSet::Entry> given;
  std::string missing, unexpected, wrong;
  const auto add = [](std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; };
  for (const auto& [name, entry] : set_.entries()) {
    const std::string full = full_name(name);
    check_contents(is_mask(full) || given.emplace(full, entry).second, dir, ": holds ", full,
                   " twice, with and without \"", prefix, "\"; keep one");
  }
  const bool head_given = config.tie_word_embeddings && given.contains(head_name);
  const SafetensorsSet::Entry head = head_given ? given.extract(head_name).mapped() : SafetensorsSet::Entry();
  for (const Parameter& p : table.parameters) {
    const auto found = given.extract(p.name);
    if (found.empty()) {
      add(missing, p.name);
      continue;
    }
    const StoredTensor& tensor = *found.mapped().second;
    const StoredTensor expected{p.name, FileType::F32, p.shape};
    if (tensor.shape != p.shape || !readable(tensor)) add(wrong, tensor.describe() + " for " + expected.describe());
    entries_.push_back(found.mapped());
  }
  for (const auto& [name, entry] : given) add(unexpected, entry.second->name);
  check_contents(missing.empty() && unexpected.empty() && wrong.empty(), dir,
                 ": its tensors are not those of its config.json", missing.empty() ? "" : "; missing: " + missing,
                 unexpected.empty() ? "" : "; unexpected: " + unexpected,
                 wrong.empty() ? "" : "; of another shape or type: " + wrong);
  // The table of a tied model begins with the embedding.
  if (head_given && !(readable(*head.second) && equal(entries_.front(), head))) {
    warnings_.push_back(
        dir +
        ": lm_head.weight differs from transformer.wte.weight although config.json says tie_word_embeddings; "
        "it is not used (set tie_word_embeddings to false to use it)");
  }
}

void ModelReader::read(std::size_t parameter, std::int64_t first, std::int64_t count, float* out) const {
  const auto& [file, tensor] = entries_.at(parameter);
  file->read(*tensor, first, count, out);
}

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

namespace {

// The files that one rank writes, tensor after tensor.
class FileQueue {
 public:
  FileQueue(const std::string& dir, const std::vector<StoredTensor>& tensors) : dir_(dir), tensors_(tensors) {}
  void add(const std::string& name, std::size_t first, std::size_t count) {
    files_.push_back({name, first, first + count});
    for (std::size_t i = first; i < first + count; ++i) order_.push_back(static_cast<std::int64_t>(i));
  }
  std::int64_t tensor(std::size_t turn) const { return turn < order_.size() ? order_[turn] : -1; }
  std::size_t turns() const { return order_.size(); }
  void write(const std::vector<float>& values) {
    const auto& [name, first, last] = files_[file_];
    if (!writer_) {
      writer_ = std::make_shared<SafetensorsWriter>(str(dir_, "/", name),
                                                    std::vector(tensors_.begin() + static_cast<std::ptrdiff_t>(first),
                                                                tensors_.begin() + static_cast<std::ptrdiff_t>(last)));
    }
    writer_->write(values.data(), static_cast<std::int64_t>(values.size()));
    if (static_cast<std::size_t>(order_[turn_++]) + 1 < last) return;
    writer_->close();
    checksums.insert(writer_->checksums().begin(), writer_->checksums().end());
    writer_.reset();
    ++file_;
  }
  std::map<std::string, std::string> checksums;

 private:
  struct Named {
    std::string name;
    std::size_t first, last;
  };
  std::string dir_;
  const std::vector<StoredTensor>& tensors_;
  std::vector<Named> files_;
  std::vector<std::int64_t> order_;
  std::size_t file_ = 0, turn_ = 0;
  std::shared_ptr<SafetensorsWriter> writer_;
};

}  // namespace

std::map<std::string, std::string> write_tensors(const std::string& dir, const std::string& stem,
                                                 const std::vector<StoredTensor>& tensors, const Gather& gather,
                                                 Communicator& group, std::int64_t limit) {
  std::int64_t total = 0;
  for (const StoredTensor& t : tensors) total += t.bytes();
  // The smallest files of which no writer has more than one, where `limit` allows that.
  const std::size_t ranks = std::min(static_cast<std::size_t>(group.size()), most_writers);
  std::int64_t low = std::min(limit, (total + group.size() - 1) / group.size()), high = limit;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (split_files(tensors, stem, middle).size() <= ranks)
      high = middle;
    else
      low = middle + 1;
  }
  const auto files = split_files(tensors, stem, high);
  std::vector<FileQueue> queues(static_cast<std::size_t>(group.size()), FileQueue(dir, tensors));
  Json map = Json::object();
  std::size_t first = 0, turns = 0;
  for (std::size_t f = 0; f < files.size(); ++f) {
    // Spread over the group: neighbours may share a machine.
    FileQueue& queue = queues[files.size() < queues.size() ? f * queues.size() / files.size() : f % queues.size()];
    queue.add(files[f].first, first, files[f].second.size());
    first += files[f].second.size();
    turns = std::max(turns, queue.turns());
    for (const StoredTensor& t : files[f].second) map.set(t.name, files[f].first);
  }
  FileQueue& mine = queues[static_cast<std::size_t>(group.rank())];
  std::exception_ptr failure;  // kept until the others have had their tensors
  for (std::size_t turn = 0; turn < turns; ++turn) {
    std::vector<std::int64_t> wanted;
    wanted.reserve(queues.size());
    for (const FileQueue& queue : queues) wanted.push_back(queue.tensor(turn));
    const std::int64_t own = mine.tensor(turn);
    std::vector<float> values(own < 0 ? 0 : static_cast<std::size_t>(tensors[static_cast<std::size_t>(own)].numel()));
    gather(wanted, values.data());
    try {
      if (own >= 0 && !failure) mine.write(values);
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
  return mine.checksums;
}

std::vector<StoredTensor> model_tensors(const ParameterTable& table, FileType type) {
  std::vector<StoredTensor> tensors;
  for (const Parameter& p : table.parameters) tensors.push_back({p.name, type, p.shape});
  return tensors;
}

std::map<std::string, std::string> write_model(const std::string& dir, const ModelConfig& config,
                                               const ParameterTable& table, const Gather& gather, FileType type,
                                               Communicator& group, std::int64_t limit) {
  check(type == FileType::F32 || type == FileType::BF16 || type == FileType::F16,
        "a model is written as F32, BF16 or F16, not ", name_of(type));
  auto checksums = write_tensors(dir, "model", model_tensors(table, type), gather, group, limit);
  if (group.rank() == 0) {
    write_text(dir + "/config.json", config_json(config, type == FileType::F32    ? "float32"
                                                         : type == FileType::BF16 ? "bfloat16"
                                                                                  : "float16"));
  }
  return checksums;
}

}  // namespace onescale
