#include "model/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iomanip>
#include <set>
#include <type_traits>
#include <utility>

#include "model/half.h"
#include "parallel/json.h"

namespace onescale {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::int64_t piece = 1 << 20;               // bytes read or converted at a time
constexpr std::int64_t largest_header = 100'000'000;  // as in the format's reference implementation

// By FileType.
constexpr std::pair<const char*, std::int64_t> types[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                                                          {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1},   {"BOOL", 1}};

std::string hex(std::uint64_t hash) {
  return str(std::hex, std::setfill('0'), std::setw(16), hash);
}

std::shared_ptr<XXH3_state_t> new_state() {
  std::shared_ptr<XXH3_state_t> state(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(state.get());
  return state;
}

// The product of the dimensions, or -1 where it does not fit in 63 bits.
std::int64_t checked_numel(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (std::int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(n, d, &n)) return -1;
  }
  return n;
}

std::string header_text(const std::vector<StoredTensor>& tensors) {
  Json header = Json::object(), metadata = Json::object();
  metadata.set("format", "pt");  // without it transformers refuses the file
  header.set("__metadata__", metadata);
  std::int64_t offset = 0;
  for (const StoredTensor& t : tensors) {
    check(!header.has(t.name) && t.numel() >= 0, "two tensors to write are called ", t.name,
          ", or its shape is impossible");
    Json entry = Json::object(), shape = Json::array(), range = Json::array();
    for (std::int64_t d : t.shape) shape.push(d);
    range.push(offset);
    range.push(offset += t.bytes());
    entry.set("dtype", name_of(t.type));
    entry.set("shape", shape);
    entry.set("data_offsets", range);
    header.set(t.name, entry);
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the tensors begin aligned
  return text;
}

// A tensor's entry in the header of a file with data_size bytes of data; its offset counts from their start.
StoredTensor read_entry(const Json& entry, const std::string& name, std::int64_t data_size, const std::string& path) {
  const Json shape = entry.at("shape"), range = entry.at("data_offsets");
  StoredTensor tensor{name, FileType::F32, {}};
  const std::string type = entry.at("dtype").string();
  const auto* known = std::find_if(std::begin(types), std::end(types), [&](const auto& t) { return type == t.first; });
  check(known != std::end(types), path, ": tensor ", name, " has the dtype \"", type, "\", which is not known here");
  tensor.type = static_cast<FileType>(known - types);
  for (std::int64_t i = 0; i < shape.size(); ++i) tensor.shape.push_back(shape.at(i).integer());
  check(range.size() == 2, path, ": tensor ", name, " has ", range.size(), " data_offsets, expected 2");
  const std::int64_t begin = range.at(0).integer(), end = range.at(1).integer();
  check(begin >= 0 && begin <= end && end <= data_size, path, ": tensor ", name, " lies at bytes ", begin, " to ", end,
        ", but the file has ", data_size, " bytes of data; it is truncated or its header is damaged");
  const std::int64_t size = size_of(tensor.type), numel = tensor.numel();
  check((end - begin) % size == 0 && numel == (end - begin) / size, path, ": tensor ", tensor.describe(),
        " does not fill its ", end - begin, " bytes; its header is damaged");
  tensor.offset = begin;
  return tensor;
}

// The tensors of a file, in the order of their bytes.
std::vector<StoredTensor> read_header(const File& file) {
  const std::string& path = file.path();
  const std::int64_t file_size = file.size();
  check(file_size >= 8, path, ": has ", file_size, " bytes, too few for a safetensors file; it is truncated");
  std::uint64_t length = 0;
  file.read(&length, 8, 0);
  check(length >= 2 && length <= static_cast<std::uint64_t>(std::min(largest_header, file_size - 8)), path,
        ": announces a header of ", length, " bytes in a file of ", file_size,
        "; it is truncated or no safetensors file");
  std::string text(length, '\0');
  file.read(text.data(), std::ssize(text), 8);
  std::int64_t end = 8 + std::ssize(text);
  const Json header = Json::parse(text, path + ", header");
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    tensors.push_back(read_entry(entry, name, file_size - 8 - std::ssize(text), path));
    tensors.back().offset += end;
  }
  std::stable_sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.offset, a.bytes()) < std::pair(b.offset, b.bytes());
  });
  for (const StoredTensor& t : tensors) {
    check(t.offset == end, path, ": tensor ", t.name, " begins at byte ", t.offset, " where ", end,
          " was expected; its header leaves a hole or lets tensors overlap");
    end += t.bytes();
  }
  check(end == file_size, path, ": has ", file_size, " bytes, but its tensors end at ", end,
        "; something was appended or its header is damaged");
  return tensors;
}

}  // namespace

std::int64_t size_of(FileType type) {
  return types[static_cast<std::size_t>(type)].second;
}
const char* name_of(FileType type) {
  return types[static_cast<std::size_t>(type)].first;
}

std::int64_t StoredTensor::numel() const {
  return checked_numel(shape);
}

std::string StoredTensor::describe() const {
  std::string text = str(name, " ", name_of(type), " [");
  for (std::size_t i = 0; i < shape.size(); ++i) text += str(i ? ", " : "", shape[i]);
  return text + "]";
}

std::string checksum(const void* data, std::size_t bytes) {
  return hex(XXH3_64bits(data, bytes));
}

SafetensorsReader::SafetensorsReader(const std::string& path) : where_(path) {
  add(path);
}

SafetensorsReader::SafetensorsReader(const std::string& dir, const std::string& stem) : where_(dir) {
  const std::string single = dir + "/" + stem + ".safetensors", index = single + ".index.json";
  std::error_code ignored;
  const bool one = std::filesystem::exists(single, ignored);
  check_contents(one || std::filesystem::exists(index, ignored), dir, ": has neither ", stem, ".safetensors nor ", stem,
                 ".safetensors.index.json; give a model saved by save_pretrained as safetensors");
  std::set<std::string> names;
  if (one) names.insert(stem + ".safetensors");
  const Json map = one ? Json::object() : Json::read_file(index).at("weight_map");
  for (const auto& [tensor, file] : map.items()) {
    const std::string name = file.string();
    check_contents(!name.empty() && name.find('/') == std::string::npos, index, ": tensor ", tensor,
                   " is said to be in \"", name, "\", which is no file name of its directory; write the index anew");
    names.insert(name);
  }
  for (const std::string& name : names) add(str(dir, "/", name));
}

void SafetensorsReader::add(const std::string& path) {
  files_.push_back(File::open(path));
  std::vector<StoredTensor> tensors;
  try {
    tensors = read_header(files_.back());
  } catch (const UnreadableFile&) {
    throw;
  } catch (const Error& e) {
    throw DamagedFile(str(e.what(), "; copy or write the file anew"));
  }
  for (StoredTensor& tensor : tensors) {
    check_contents(by_name_.emplace(tensor.name, tensors_.size()).second, path, ": tensor ", tensor.name,
                   " is also in another file of the model; keep one");
    tensor.file = files_.size() - 1;
    tensors_.push_back(std::move(tensor));
  }
}

const StoredTensor* SafetensorsReader::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& SafetensorsReader::at(const std::string& name) const {
  const StoredTensor* tensor = find(name);
  check_contents(tensor != nullptr, where_, ": has no tensor ", name, "; get it anew");
  return *tensor;
}

template <class T>
void SafetensorsReader::read(const StoredTensor& tensor, std::int64_t first, std::int64_t count, T* out) const {
  const File& file = files_[tensor.file];
  check(first >= 0 && count >= 0 && first <= tensor.numel() - count, file.path(), ": elements ", first, " to ",
        first + count, " were asked for of ", tensor.describe());
  constexpr bool real = std::is_floating_point_v<T>;
  check(real ? tensor.type <= FileType::BF16 : tensor.type == FileType::I64 || tensor.type == FileType::I32,
        file.path(), ": tensor ", tensor.describe(), " must be of ", real ? "F32, BF16, F16 or F64" : "I64 or I32",
        "; convert it");
  const std::int64_t size = size_of(tensor.type), step = piece / size;
  if (std::is_same_v<T, float> && tensor.type == FileType::F32)  // the common case goes straight to its place
    return file.read(out, count * size, tensor.offset + first * size);
  std::vector<char> buffer(static_cast<std::size_t>(std::min(piece, count * size)));
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    file.read(buffer.data(), n * size, tensor.offset + (first + done) * size);
    const auto convert = [&]<class From>(From, auto value_of) {
      for (std::int64_t i = 0; i < n; ++i) {
        From value;
        std::memcpy(&value, buffer.data() + i * size, sizeof value);
        out[done + i] = static_cast<T>(value_of(value));
      }
    };
    if (tensor.type == FileType::F64) convert(double{}, std::identity());
    if (tensor.type == FileType::F32) convert(float{}, std::identity());
    if (tensor.type == FileType::F16) convert(std::uint16_t{}, float_of_half);
    if (tensor.type == FileType::BF16) convert(std::uint16_t{}, float_of_bfloat16);
    if (tensor.type == FileType::I64) convert(std::int64_t{}, std::identity());
    if (tensor.type == FileType::I32) convert(std::int32_t{}, std::identity());
  }
}

template void SafetensorsReader::read(const StoredTensor&, std::int64_t, std::int64_t, float*) const;
template void SafetensorsReader::read(const StoredTensor&, std::int64_t, std::int64_t, double*) const;
template void SafetensorsReader::read(const StoredTensor&, std::int64_t, std::int64_t, std::int64_t*) const;

std::string SafetensorsReader::checksum(const StoredTensor& tensor) const {
  const std::shared_ptr<XXH3_state_t> state = new_state();
  std::vector<char> buffer(static_cast<std::size_t>(std::min(piece, tensor.bytes())));
  for (std::int64_t done = 0; done < tensor.bytes(); done += piece) {
    const std::int64_t n = std::min(piece, tensor.bytes() - done);
    files_[tensor.file].read(buffer.data(), n, tensor.offset + done);
    XXH3_64bits_update(state.get(), buffer.data(), static_cast<std::size_t>(n));
  }
  return hex(XXH3_64bits_digest(state.get()));
}

std::int64_t file_bytes(const std::vector<StoredTensor>& tensors) {
  std::int64_t bytes = 8 + std::ssize(header_text(tensors));
  for (const StoredTensor& t : tensors) bytes += t.bytes();
  return bytes;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors)
    : file_(File::create(path)), tensors_(std::move(tensors)), state_(new_state()) {
  const std::string header = header_text(tensors_);
  const std::uint64_t length = header.size();
  file_.write(&length, 8);
  file_.write(header.data(), std::ssize(header));
  finish_tensor();
}

// Steps over every tensor that is whole; one without elements is so at once.
void SafetensorsWriter::finish_tensor() {
  while (current_ < tensors_.size() && written_ == tensors_[current_].bytes()) {
    checksums_[tensors_[current_].name] = hex(XXH3_64bits_digest(state_.get()));
    XXH3_64bits_reset(state_.get());
    ++current_;
    written_ = 0;
  }
}

void SafetensorsWriter::write_bytes(const void* data, std::int64_t bytes) {
  if (bytes == 0) return;
  check(current_ < tensors_.size() && bytes <= tensors_[current_].bytes() - written_, file_.path(), ": ", bytes,
        " bytes were given beyond the end of ",
        current_ < tensors_.size() ? tensors_[current_].describe() : "the last tensor");
  file_.write(data, bytes);
  XXH3_64bits_update(state_.get(), data, static_cast<std::size_t>(bytes));
  written_ += bytes;
  finish_tensor();
}

void SafetensorsWriter::write(const float* values, std::int64_t count) {
  if (current_ == tensors_.size() || tensors_[current_].type == FileType::F32) return write_bytes(values, count * 4);
  check(tensors_[current_].type == FileType::BF16, file_.path(), ": float values were given for ",
        tensors_[current_].describe());
  std::vector<std::uint16_t> buffer(static_cast<std::size_t>(std::min(count, piece / 2)));
  for (std::int64_t done = 0; done < count; done += piece / 2) {
    const std::int64_t n = std::min(count - done, piece / 2);
    std::transform(values + done, values + done + n, buffer.begin(), bfloat16_of_float);
    write_bytes(buffer.data(), n * 2);
  }
}

void SafetensorsWriter::close() {
  check(current_ == tensors_.size(), file_.path(), ": tensor ",
        current_ < tensors_.size() ? tensors_[current_].describe() : "", " was not written to its end");
  file_.close();
}

}  // namespace onescale
