#include "model/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "model/half.h"
#include "parallel/json.h"

namespace onescale {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::int64_t piece = 1 << 20;               // bytes read or converted at a time
constexpr std::int64_t largest_header = 100'000'000;  // as in the format's reference implementation

struct TypeName {
  FileType type;
  const char* name;
  std::int64_t size;
};
constexpr std::array<TypeName, 10> types = {{{FileType::F64, "F64", 8},
                                             {FileType::F32, "F32", 4},
                                             {FileType::F16, "F16", 2},
                                             {FileType::BF16, "BF16", 2},
                                             {FileType::I64, "I64", 8},
                                             {FileType::I32, "I32", 4},
                                             {FileType::I16, "I16", 2},
                                             {FileType::I8, "I8", 1},
                                             {FileType::U8, "U8", 1},
                                             {FileType::BOOL, "BOOL", 1}}};

void free_state(XXH3_state_t* state) {
  XXH3_freeState(state);
}

std::string hex(std::uint64_t hash) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 0; i < 16; ++i) text[15 - i] = digits[hash >> 4 * i & 15];
  return text;
}

// The product of the dimensions, or -1 where it does not fit in 63 bits.
std::int64_t checked_numel(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (std::int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(n, d, &n)) return -1;
  }
  return n;
}

std::string header_text(const std::vector<StoredTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) {
    Json entries = Json::object();
    for (const auto& [key, value] : metadata) entries.set(key, value);
    header.set("__metadata__", entries);
  }
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

StoredTensor read_entry(const Json& header, const std::string& name, std::int64_t data, std::int64_t file_size,
                        const std::string& path) {
  const Json entry = header.at(name), shape = entry.at("shape"), range = entry.at("data_offsets");
  StoredTensor tensor;
  tensor.name = name;
  const std::string type = entry.at("dtype").string();
  const auto* known = std::find_if(types.begin(), types.end(), [&](const TypeName& t) { return type == t.name; });
  check_contents(known != types.end(), path, ": tensor ", name, " has the dtype \"", type,
                 "\", which is not known here");
  tensor.type = known->type;
  for (std::int64_t i = 0; i < shape.size(); ++i) tensor.shape.push_back(shape.at(i).integer());
  check_contents(range.size() == 2, path, ": tensor ", name, " has ", range.size(), " data_offsets, expected 2");
  const std::int64_t begin = range.at(0).integer(), end = range.at(1).integer();
  check_contents(begin >= 0 && begin <= end && end <= file_size - data, path, ": tensor ", name, " lies at bytes ",
                 begin, " to ", end, ", but the file has ", file_size - data,
                 " bytes of data; it is truncated or its header is damaged");
  const std::int64_t numel = checked_numel(tensor.shape);
  check_contents(numel >= 0 && numel <= (end - begin) / known->size && numel * known->size == end - begin, path,
                 ": tensor ", tensor.describe(), " does not fill its ", end - begin, " bytes; the header is damaged");
  tensor.offset = data + begin;
  return tensor;
}

}  // namespace

std::int64_t size_of(FileType type) {
  return types[static_cast<std::size_t>(type)].size;
}
const char* name_of(FileType type) {
  return types[static_cast<std::size_t>(type)].name;
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

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(File::open(path)) {
  const std::int64_t file_size = file_.size();
  check_contents(file_size >= 8, path, ": has ", file_size, " bytes, too few for a safetensors file; it is truncated");
  std::uint64_t length = 0;
  file_.read(&length, 8, 0);
  check_contents(length >= 2 && length <= static_cast<std::uint64_t>(std::min(largest_header, file_size - 8)), path,
                 ": announces a header of ", length, " bytes in a file of ", file_size,
                 "; it is truncated or no safetensors file");
  const std::int64_t data = 8 + static_cast<std::int64_t>(length);
  std::string text(length, '\0');
  file_.read(text.data(), static_cast<std::int64_t>(length), 8);
  try {
    const Json header = Json::parse(text, path + ", header");
    for (const std::string& name : header.keys()) {
      if (name != "__metadata__") tensors_.push_back(read_entry(header, name, data, file_size, path));
    }
  } catch (const Error& e) {
    throw DamagedFile(e.what());
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.offset, a.bytes()) < std::pair(b.offset, b.bytes());
  });
  std::int64_t end = data;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const StoredTensor& t = tensors_[i];
    check_contents(t.offset == end, path, ": tensor ", t.name, " begins at byte ", t.offset, " where ", end,
                   " was expected; its header leaves a hole or lets tensors overlap");
    end += t.bytes();
    by_name_[t.name] = i;
  }
  check_contents(end == file_size, path, ": has ", file_size, " bytes, but its tensors end at ", end,
                 "; something was appended or its header is damaged");
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& SafetensorsFile::at(const std::string& name) const {
  const StoredTensor* tensor = find(name);
  check_contents(tensor != nullptr, path(), ": has no tensor ", name);
  return *tensor;
}

void SafetensorsFile::read_bytes(const StoredTensor& tensor, std::int64_t first, std::int64_t bytes, void* out) const {
  check(first >= 0 && bytes >= 0 && first <= tensor.bytes() - bytes, path(), ": bytes ", first, " to ", first + bytes,
        " were asked for of ", tensor.describe());
  file_.read(out, bytes, tensor.offset + first);
}

template <class T>
void SafetensorsFile::read_converted(const StoredTensor& tensor, std::int64_t first, std::int64_t count, T* out) const {
  check(first >= 0 && count >= 0 && first <= tensor.numel() - count, path(), ": elements ", first, " to ",
        first + count, " were asked for of ", tensor.describe());
  std::vector<char> buffer(static_cast<std::size_t>(std::min(piece, count * size_of(tensor.type))));
  const std::int64_t step = piece / size_of(tensor.type);
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    read_bytes(tensor, (first + done) * size_of(tensor.type), n * size_of(tensor.type), buffer.data());
    auto convert = [&]<class From>(From, auto value_of) {
      for (std::int64_t i = 0; i < n; ++i) {
        From value;
        std::memcpy(&value, buffer.data() + i * static_cast<std::int64_t>(sizeof value), sizeof value);
        out[done + i] = static_cast<T>(value_of(value));
      }
    };
    auto same = [](auto value) { return value; };
    bool known = true;
    if constexpr (std::is_floating_point_v<T>) {
      switch (tensor.type) {
        case FileType::F64:
          convert(double{}, same);
          break;
        case FileType::F32:
          convert(float{}, same);
          break;
        case FileType::F16:
          convert(std::uint16_t{}, float_of_half);
          break;
        case FileType::BF16:
          convert(std::uint16_t{}, float_of_bfloat16);
          break;
        default:
          known = false;
      }
    } else {
      switch (tensor.type) {
        case FileType::I64:
          convert(std::int64_t{}, same);
          break;
        case FileType::I32:
          convert(std::int32_t{}, same);
          break;
        default:
          known = false;
      }
    }
    check(known, path(), ": tensor ", tensor.describe(), " must be of ",
          std::is_floating_point_v<T> ? "F32, BF16, F16 or F64" : "I64 or I32", "; convert it");
  }
}

void SafetensorsFile::read(const StoredTensor& tensor, std::int64_t first, std::int64_t count, float* out) const {
  if (tensor.type == FileType::F32) {  // the common case goes straight to its place
    read_bytes(tensor, first * 4, count * 4, out);
  } else {
    read_converted(tensor, first, count, out);
  }
}

void SafetensorsFile::read(const StoredTensor& tensor, std::int64_t first, std::int64_t count, double* out) const {
  read_converted(tensor, first, count, out);
}

void SafetensorsFile::read(const StoredTensor& tensor, std::int64_t first, std::int64_t count,
                           std::int64_t* out) const {
  read_converted(tensor, first, count, out);
}

std::string SafetensorsFile::checksum(const StoredTensor& tensor) const {
  const std::unique_ptr<XXH3_state_t, void (*)(XXH3_state_t*)> state(XXH3_createState(), free_state);
  XXH3_64bits_reset(state.get());
  std::vector<char> buffer(static_cast<std::size_t>(std::min(piece, tensor.bytes())));
  for (std::int64_t done = 0; done < tensor.bytes(); done += piece) {
    const std::int64_t n = std::min(piece, tensor.bytes() - done);
    read_bytes(tensor, done, n, buffer.data());
    XXH3_64bits_update(state.get(), buffer.data(), static_cast<std::size_t>(n));
  }
  return hex(XXH3_64bits_digest(state.get()));
}

std::int64_t file_bytes(const std::vector<StoredTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  std::int64_t bytes = 8 + static_cast<std::int64_t>(header_text(tensors, metadata).size());
  for (const StoredTensor& t : tensors) bytes += t.bytes();
  return bytes;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(File::create(path)), tensors_(std::move(tensors)), state_(XXH3_createState(), free_state) {
  const std::string header = header_text(tensors_, metadata);
  const std::uint64_t length = header.size();
  XXH3_64bits_reset(state_.get());
  file_.write(&length, 8);
  file_.write(header.data(), static_cast<std::int64_t>(length));
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
  check(current_ < tensors_.size() && bytes <= tensors_[current_].bytes() - written_, path(), ": ", bytes,
        " bytes were given beyond the end of ",
        current_ < tensors_.size() ? tensors_[current_].describe() : "the last tensor");
  file_.write(data, bytes);
  XXH3_64bits_update(state_.get(), data, static_cast<std::size_t>(bytes));
  written_ += bytes;
  finish_tensor();
}

void SafetensorsWriter::write(const float* values, std::int64_t count) {
  if (count == 0) return;
  check(current_ < tensors_.size(), path(), ": ", count, " values were given beyond the last tensor");
  const StoredTensor& tensor = tensors_[current_];
  if (tensor.type == FileType::F32) return write_bytes(values, count * 4);
  check(tensor.type == FileType::BF16 || tensor.type == FileType::F16, path(), ": float values were given for ",
        tensor.describe());
  check(count * 2 <= tensor.bytes() - written_, path(), ": ", count, " values were given beyond the end of ",
        tensor.describe());
  const auto convert = tensor.type == FileType::BF16 ? bfloat16_of_float : half_of_float;
  std::vector<std::uint16_t> buffer(static_cast<std::size_t>(std::min(count, piece / 2)));
  for (std::int64_t done = 0; done < count; done += piece / 2) {
    const std::int64_t n = std::min(count - done, piece / 2);
    std::transform(values + done, values + done + n, buffer.begin(), convert);
    write_bytes(buffer.data(), n * 2);
  }
}

void SafetensorsWriter::close() {
  check(current_ == tensors_.size(), path(), ": tensor ",
        current_ < tensors_.size() ? tensors_[current_].describe() : "", " was not written to its end");
  file_.close();
}

}  // namespace onescale
