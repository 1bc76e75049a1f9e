#include "model/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iomanip>
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
  const char* name;
  std::int64_t size;
};
// By FileType.
constexpr std::array<TypeName, 10> types = {{{"F64", 8},
                                             {"F32", 4},
                                             {"F16", 2},
                                             {"BF16", 2},
                                             {"I64", 8},
                                             {"I32", 4},
                                             {"I16", 2},
                                             {"I8", 1},
                                             {"U8", 1},
                                             {"BOOL", 1}}};

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

StoredTensor read_entry(const Json& header, const std::string& name, std::int64_t data, std::int64_t file_size,
                        const std::string& path) {
  const Json entry = header.at(name), shape = entry.at("shape"), range = entry.at("data_offsets");
  StoredTensor tensor{name, FileType::F32, {}};
  const std::string type = entry.at("dtype").string();
  const auto* known = std::find_if(types.begin(), types.end(), [&](const TypeName& t) { return type == t.name; });
  check(known != types.end(), path, ": tensor ", name, " has the dtype \"", type, "\", which is not known here");
  tensor.type = static_cast<FileType>(known - types.begin());
  for (std::int64_t i = 0; i < shape.size(); ++i) tensor.shape.push_back(shape.at(i).integer());
  check(range.size() == 2, path, ": tensor ", name, " has ", range.size(), " data_offsets, expected 2");
  const std::int64_t begin = range.at(0).integer(), end = range.at(1).integer();
  check(begin >= 0 && begin <= end && end <= file_size - data, path, ": tensor ", name, " lies at bytes ", begin,
        " to ", end, ", but the file has ", file_size - data,
        " bytes of data; it is truncated or its header is damaged");
  const std::int64_t numel = checked_numel(tensor.shape);
  check(numel >= 0 && numel <= (end - begin) / known->size && numel * known->size == end - begin, path, ": tensor ",
        tensor.describe(), " does not fill its ", end - begin, " bytes; its header is damaged");
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
  try {
    read_header();
  } catch (const UnreadableFile&) {
    throw;
  } catch (const Error& e) {
    throw DamagedFile(str(e.what(), "; copy or write the file anew"));
  }
}

void SafetensorsFile::read_header() {
  const std::int64_t file_size = file_.size();
  check(file_size >= 8, path(), ": has ", file_size, " bytes, too few for a safetensors file; it is truncated");
  std::uint64_t length = 0;
  file_.read(&length, 8, 0);
  check(length >= 2 && length <= static_cast<std::uint64_t>(std::min(largest_header, file_size - 8)), path(),
        ": announces a header of ", length, " bytes in a file of ", file_size,
        "; it is truncated or no safetensors file");
  const std::int64_t data = 8 + static_cast<std::int64_t>(length);
  std::string text(length, '\0');
  file_.read(text.data(), static_cast<std::int64_t>(length), 8);
  const Json header = Json::parse(text, path() + ", header");
  for (const std::string& name : header.keys()) {
    if (name != "__metadata__") tensors_.push_back(read_entry(header, name, data, file_size, path()));
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.offset, a.bytes()) < std::pair(b.offset, b.bytes());
  });
  std::int64_t end = data;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const StoredTensor& t = tensors_[i];
    check(t.offset == end, path(), ": tensor ", t.name, " begins at byte ", t.offset, " where ", end,
          " was expected; its header leaves a hole or lets tensors overlap");
    end += t.bytes();
    by_name_[t.name] = i;
  }
  check(end == file_size, path(), ": has ", file_size, " bytes, but its tensors end at ", end,
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

template <class T>
void SafetensorsFile::read(const StoredTensor& tensor, std::int64_t first, std::int64_t count, T* out) const {
  check(first >= 0 && count >= 0 && first <= tensor.numel() - count, path(), ": elements ", first, " to ",
        first + count, " were asked for of ", tensor.describe());
  const std::int64_t size = size_of(tensor.type);
  if (std::is_same_v<T, float> && tensor.type == FileType::F32)  // the common case goes straight to its place
    return file_.read(out, count * size, tensor.offset + first * size);
  std::vector<char> buffer(static_cast<std::size_t>(std::min(piece, count * size)));
  const std::int64_t step = piece / size;
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    file_.read(buffer.data(), n * size, tensor.offset + (first + done) * size);
    const auto convert = [&]<class From>(From, auto value_of) {
      for (std::int64_t i = 0; i < n; ++i) {
        From value;
        std::memcpy(&value, buffer.data() + i * size, sizeof value);
        out[done + i] = static_cast<T>(value_of(value));
      }
    };
    const auto same = [](auto value) { return value; };
    constexpr bool real = std::is_floating_point_v<T>;
    if (real && tensor.type == FileType::F64) {
      convert(double{}, same);
    } else if (real && tensor.type == FileType::F32) {
      convert(float{}, same);
    } else if (real && tensor.type == FileType::F16) {
      convert(std::uint16_t{}, float_of_half);
    } else if (real && tensor.type == FileType::BF16) {
      convert(std::uint16_t{}, float_of_bfloat16);
    } else if (!real && tensor.type == FileType::I64) {
      convert(std::int64_t{}, same);
    } else if (!real && tensor.type == FileType::I32) {
      convert(std::int32_t{}, same);
    } else {
      throw Error(str(path(), ": tensor ", tensor.describe(), " must be of ",
                      real ? "F32, BF16, F16 or F64" : "I64 or I32", "; convert it"));
    }
  }
}

template void SafetensorsFile::read(const StoredTensor&, std::int64_t, std::int64_t, float*) const;
template void SafetensorsFile::read(const StoredTensor&, std::int64_t, std::int64_t, double*) const;
template void SafetensorsFile::read(const StoredTensor&, std::int64_t, std::int64_t, std::int64_t*) const;

std::string SafetensorsFile::checksum(const StoredTensor& tensor) const {
  const std::shared_ptr<XXH3_state_t> state = new_state();
  std::vector<char> buffer(static_cast<std::size_t>(std::min(piece, tensor.bytes())));
  for (std::int64_t done = 0; done < tensor.bytes(); done += piece) {
    const std::int64_t n = std::min(piece, tensor.bytes() - done);
    file_.read(buffer.data(), n, tensor.offset + done);
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
