#include "model/hf_files.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
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

const std::map<std::string, std::string> metadata = {{"format", "pt"}};  // without it transformers refuses the file

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
                     " is said to be in \"", name, "\", which is no file name of its directory");
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

SafetensorsSet::Entry SafetensorsSet::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? Entry{nullptr, nullptr} : found->second;
}

SafetensorsSet::Entry SafetensorsSet::at(const std::string& name) const {
  const Entry entry = find(name);
  check_contents(entry.second != nullptr, dir_, ": none of its files has the tensor ", name);
  return entry;
}

ModelReader::ModelReader(const std::string& dir, const ModelConfig& config, const ParameterTable& table)
    : set_(dir, "model") {
  std::map<std::string, SafetensorsSet::Entry> given;
  std::string missing, unexpected, wrong;
  auto add = [](std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; };
  for (const auto& [name, entry] : set_.entries()) {
    const std::string full = full_name(name);
    if (is_mask(full)) continue;
    check_contents(given.emplace(full, entry).second, dir, ": holds ", full, " twice, with and without \"", prefix,
                   "\"; keep one");
  }
  for (const Parameter& p : table.parameters) {
    const auto found = given.find(p.name);
    if (found == given.end()) {
      add(missing, p.name);
      continue;
    }
    const StoredTensor& tensor = *found->second.second;
    const StoredTensor expected{p.name, FileType::F32, p.shape};
    if (tensor.shape != p.shape || !readable(tensor)) add(wrong, tensor.describe() + " for " + expected.describe());
    entries_.push_back(found->second);
    if (p.name != "transformer.wte.weight") given.erase(found);
  }
  const auto wte = given.find("transformer.wte.weight"), head = given.find(head_name);
  if (config.tie_word_embeddings && head != given.end() && wte != given.end() && missing.empty() && wrong.empty()) {
    if (!readable(*head->second.second) || !equal(wte->second, head->second)) {
      warnings_.push_back(
          dir +
          ": lm_head.weight differs from transformer.wte.weight although config.json says tie_word_embeddings; "
          "it is not used (set tie_word_embeddings to false to use it)");
    }
  }
  for (const auto& [name, entry] : given) {
    if (name != "transformer.wte.weight" && name != head_name) add(unexpected, entry.second->name);
  }
  check_contents(missing.empty() && unexpected.empty() && wrong.empty(), dir,
                 ": its tensors are not those of its config.json", missing.empty() ? "" : "; missing: " + missing,
                 unexpected.empty() ? "" : "; unexpected: " + unexpected,
                 wrong.empty() ? "" : "; of another shape or type: " + wrong);
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

std::map<std::string, std::string> write_tensors(const std::string& dir, const std::string& stem,
                                                 const std::vector<StoredTensor>& tensors, const Fetch& fetch,
                                                 std::int64_t limit) {
  std::map<std::string, std::string> checksums;
  const auto files = split_files(tensors, stem, limit);
  Json map = Json::object();
  std::size_t index = 0;
  std::int64_t total = 0;
  std::vector<float> values;
  for (const auto& [name, list] : files) {
    SafetensorsWriter writer(str(dir, "/", name), list, metadata);
    for (const StoredTensor& t : list) {
      values.resize(static_cast<std::size_t>(t.numel()));
      fetch(index++, values.data());
      writer.write(values.data(), t.numel());
      total += t.bytes();
      map.set(t.name, name);
    }
    writer.close();
    checksums.insert(writer.checksums().begin(), writer.checksums().end());
  }
  if (files.size() > 1) {
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
                                               const ParameterTable& table, const Fetch& fetch, FileType type,
                                               std::int64_t limit) {
  check(type == FileType::F32 || type == FileType::BF16 || type == FileType::F16,
        "a model is written as F32, BF16 or F16, not ", name_of(type));
  write_text(dir + "/config.json", config_json(config, type == FileType::F32    ? "float32"
                                                       : type == FileType::BF16 ? "bfloat16"
                                                                                : "float16"));
  return write_tensors(dir, "model", model_tensors(table, type), fetch, limit);
}

}  // namespace onescale
