#include "data/shard.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>

#include "kernels/error.h"

namespace onescale {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are read and written as they lie in memory");

constexpr std::int64_t header_bytes = 1024;
constexpr std::int32_t magic_16 = 20240520, version_16 = 1, magic_32 = 20240801, version_32 = 7;
constexpr std::int32_t flag_extended = 1, flag_eot_first = 2, flag_mask = 4;
constexpr std::int64_t max_count_32 = std::numeric_limits<std::int32_t>::max();
using Header = std::array<std::int32_t, header_bytes / 4>;

std::string beside(const std::string& path, const char* extension) {
  return path.substr(0, path.size() - (path.ends_with(".bin") ? 4 : 0)) + extension;
}

template <class T>
std::string_view bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::vector<std::uint8_t> read_bytes(const File& file, std::int64_t offset, std::int64_t bytes) {
  std::vector<std::uint8_t> out(static_cast<std::size_t>(bytes));
  file.read(out.data(), bytes, offset);
  return out;
}

// Of the whole when that is small, else of stretches from its beginning to its end.
std::uint64_t sampled_hash(const File& file, std::int64_t offset, std::int64_t bytes, std::uint64_t seed) {
  constexpr std::int64_t stretch = 4096, stretches = 256;
  const bool whole = bytes <= stretch * stretches;
  for (std::int64_t i = 0; i < (whole ? 1 : stretches); ++i) {
    const std::int64_t begin = whole ? 0 : (bytes - stretch) * i / (stretches - 1);
    const std::vector<std::uint8_t> read = read_bytes(file, offset + begin, whole ? bytes : stretch);
    seed = XXH3_64bits_withSeed(read.data(), read.size(), seed);
  }
  return seed;
}

}  // namespace

ShardWriter::ShardWriter(const std::string& path, const Vocabulary& vocabulary)
    : file_(File::create(path)), vocabulary_(vocabulary) {
  file_.write(Header{}.data(), header_bytes);
}

void ShardWriter::add(std::span<const std::int32_t> ids, bool no_target) {
  for (const std::int32_t id : ids) {
    check(id >= 0 && id < vocabulary_.size, file_.path(), ": id ", id, " is not in the vocabulary of ",
          vocabulary_.size, ".");
    largest_ = std::max(largest_, id);
  }
  if (vocabulary_.size > 65536) {
    file_.write(ids.data(), std::ssize(ids) * 4);
  } else {
    const std::vector<std::uint16_t> narrow(ids.begin(), ids.end());
    file_.write(narrow.data(), std::ssize(narrow) * 2);
  }
  tokens_ += std::ssize(ids);
  if (!no_target) return;
  mask_.resize(static_cast<std::size_t>(tokens_ + 7) / 8);
  for (std::int64_t bit = tokens_ - std::ssize(ids); bit < tokens_; ++bit)
    mask_[static_cast<std::size_t>(bit / 8)] |= static_cast<std::uint8_t>(1U << bit % 8);
}

void ShardWriter::finish() {
  const bool wide = vocabulary_.size > 65536;
  Header header{};
  header[0] = wide ? magic_32 : magic_16;
  header[1] = wide ? version_32 : version_16;
  header[2] = tokens_ <= max_count_32 ? static_cast<std::int32_t>(tokens_) : -1;
  header[3] = static_cast<std::int32_t>(vocabulary_.size);
  header[4] = vocabulary_.eot;
  header[5] = flag_extended | flag_eot_first | (mask_.empty() ? 0 : flag_mask);
  std::memcpy(&header[6], vocabulary_.hash.data(), sizeof vocabulary_.hash);
  std::memcpy(&header[14], &tokens_, sizeof tokens_);
  header[16] = largest_;
  if (!mask_.empty()) {
    mask_.resize(static_cast<std::size_t>((tokens_ + 7) / 8));
    write_text(beside(file_.path(), ".mask"), bytes_of(mask_));
  }
  write_text(beside(file_.path(), ".docs"), bytes_of(ends_));
  file_.write(header.data(), header_bytes, 0);
  file_.close();
}

Shard::Shard(const std::string& path, const Vocabulary& expected) : file_(File::open(path)) {
  const std::string index = beside(path, ".idx");
  if (std::error_code ignored; std::filesystem::exists(index, ignored)) {
    open_megatron(index);
  } else {
    open_llmc(expected);
  }
  limit_ = vocabulary_.size > 0 ? vocabulary_.size : expected.size > 0 ? expected.size : std::int64_t{1} << 31;
  // Our own largest id saves the pass, and makes it when it is wrong already.
  if (claimed_largest_ >= 0 && claimed_largest_ < limit_) return;
  std::vector<std::int32_t> ids(1 << 16);
  std::vector<std::uint8_t> no_target(ids.size());
  for (std::int64_t i = 0; i < tokens_; i += std::ssize(ids))
    read(i, std::min(std::ssize(ids), tokens_ - i), ids.data(), no_target.data());
}

void Shard::open_llmc(const Vocabulary& expected) {
  const std::int64_t size = file_.size();
  check(size >= header_bytes, file_.path(), ": a token file begins with ", header_bytes, " bytes but this one has ",
        size, ": it is cut off or no token file; prepare the data again.");
  Header header;
  file_.read(header.data(), header_bytes, 0);
  const bool narrow = header[0] == magic_16 && header[1] == version_16;
  check(narrow || (header[0] == magic_32 && header[1] == version_32), file_.path(), ": magic ", header[0],
        " and version ", header[1], " are not those of a token file (", magic_16, " and ", version_16, ", or ",
        magic_32, " and ", version_32, "): prepare the data again.");
  begin_ = header_bytes;
  width_ = narrow ? 2 : 4;
  const bool extended = (header[5] & flag_extended) != 0;
  tokens_ = header[2];
  if (extended) {
    std::memcpy(&tokens_, &header[14], sizeof tokens_);
    vocabulary_.size = header[3];
    vocabulary_.eot = header[4];
    std::memcpy(vocabulary_.hash.data(), &header[6], sizeof vocabulary_.hash);
    claimed_largest_ = header[16];
    check(tokens_ == header[2] || (header[2] == -1 && tokens_ > max_count_32), file_.path(),
          ": the header gives two numbers of tokens, ", header[2], " and ", tokens_, ": prepare the data again.");
  }
  // Compared without a product, which an absurd count would overflow.
  const std::int64_t bytes = size - header_bytes;
  check(tokens_ >= 0 && bytes / width_ == tokens_ && bytes % width_ == 0, file_.path(), ": the header promises ",
        tokens_, " tokens of ", width_, " bytes, but after it there are ", bytes,
        " bytes: the file is cut off or was not finished; prepare the data again.");
  if (extended && expected.size > 0) {
    check(expected.hash == decltype(expected.hash){} || expected.hash == vocabulary_.hash, file_.path(),
          ": the tokens were made with another tokenizer than the one in use: prepare the data again or give their "
          "tokenizer.model.");
    check(vocabulary_.size <= expected.size, file_.path(), ": the tokens are of a vocabulary of ", vocabulary_.size,
          " but the one in use has ", expected.size, ": set vocab_size or prepare the data again.");
  }
  if (extended && (header[5] & flag_mask) != 0) {
    mask_.emplace(File::open(beside(file_.path(), ".mask")));
    check(mask_->size() == (tokens_ + 7) / 8, mask_->path(), ": one bit for each of ", tokens_, " tokens is ",
          (tokens_ + 7) / 8, " bytes but the file has ", mask_->size(), ": prepare the data again.");
  }
}

// "MMIDIDX\0\0", u64 version 1, u8 type (8: uint16, 4: int32), u64 sequences, u64 entries of the document index, then
// each sequence's int32 length and each one's int64 byte offset. Sequences that lie one after the other are the file.
void Shard::open_megatron(const std::string& index) {
  const std::string file = read_text(index);
  const auto value = [&]<class T>(std::int64_t offset, T) {
    T out{};
    if (offset + static_cast<std::int64_t>(sizeof out) <= std::ssize(file))
      std::memcpy(&out, file.data() + offset, sizeof out);
    return out;
  };
  const auto type = value(17, std::uint8_t{});
  const auto sequences = value(18, std::int64_t{});
  check(file.size() >= 34 && std::memcmp(file.data(), "MMIDIDX\0\0", 9) == 0 && value(9, std::int64_t{}) == 1 &&
            (type == 4 || type == 8) && sequences >= 0 && sequences <= (std::ssize(file) - 34) / 12,
        index, ": this is no Megatron index of version 1 with tokens of type 8 (uint16) or 4 (int32): write it again.");
  width_ = type == 8 ? 2 : 4;
  std::int64_t bytes = 0;
  for (std::int64_t i = 0; i < sequences; ++i) {
    const auto length = value(34 + 4 * i, std::int32_t{});
    const auto at = value(34 + 4 * sequences + 8 * i, std::int64_t{});
    check(length >= 0 && at == bytes, index, ": sequence ", i, " of ", length, " tokens lies at byte ", at, " where ",
          bytes, " was expected: write the data with its sequences in order.");
    bytes += length * width_;
  }
  check(bytes == file_.size(), file_.path(), ": has ", file_.size(), " bytes but its index describes ", bytes,
        ": one of the two is cut off; copy them again.");
  tokens_ = bytes / width_;
}

std::uint64_t Shard::hash(std::uint64_t seed) const {
  const std::array<std::int64_t, 3> shape = {begin_, width_, tokens_};
  seed = XXH3_64bits_withSeed(shape.data(), sizeof shape, seed);
  seed = sampled_hash(file_, 0, begin_, seed);
  seed = sampled_hash(file_, begin_, tokens_ * width_, seed);
  return mask_ ? sampled_hash(*mask_, 0, (tokens_ + 7) / 8, seed) : seed;
}

void Shard::read(std::int64_t first, std::int64_t count, std::int32_t* ids, std::uint8_t* no_target) const {
  check(first >= 0 && count >= 0 && first + count <= tokens_, file_.path(), ": tokens ", first, " to ", first + count,
        " were asked for but it has ", tokens_, ".");
  const std::vector<std::uint8_t> bytes = read_bytes(file_, begin_ + first * width_, count * width_);
  const std::vector<std::uint8_t> mask =
      mask_ ? read_bytes(*mask_, first / 8, (first + count + 7) / 8 - first / 8) : std::vector<std::uint8_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t id = 0;
    std::memcpy(&id, bytes.data() + i * width_, width_ == 2 ? 2 : 4);
    if (id >= static_cast<std::uint64_t>(limit_)) {
      throw Error(brief(file_.path(), ": id ", id, " at byte ", begin_ + (first + i) * width_,
                        " is not below the vocabulary size ", limit_,
                        ": the file is damaged or of another tokenizer."));
    }
    ids[i] = static_cast<std::int32_t>(id);
    const std::int64_t bit = first % 8 + i;
    no_target[i] = static_cast<std::uint8_t>(mask_ ? mask[static_cast<std::size_t>(bit / 8)] >> bit % 8 & 1 : 0);
  }
}

}  // namespace onescale
