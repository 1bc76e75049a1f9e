#include "data/shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

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

}  // namespace

struct ShardWriter::Files {
  struct File {
    std::string path;
    std::FILE* handle = nullptr;

    void open(const std::string& name) {
      path = name;
      handle = std::fopen(name.c_str(), "wb");
      check(handle != nullptr, path, ": the file cannot be created (", std::strerror(errno), ").");
    }
    void write(const void* data, std::size_t bytes) {
      const bool ok = bytes == 0 || std::fwrite(data, bytes, 1, handle) == 1;
      check(ok, path, ": writing failed (", std::strerror(errno), ").");
    }
    void rewind() {
      const bool ok = std::fseek(handle, 0, SEEK_SET) == 0;
      check(ok, path, ": writing failed (", std::strerror(errno), ").");
    }
    void close() {
      const bool ok = std::fflush(handle) == 0 && ::fsync(fileno(handle)) == 0;
      const int error = errno;
      const bool closed = std::fclose(std::exchange(handle, nullptr)) == 0;
      check(ok && closed, path, ": writing failed (", std::strerror(error), ").");
    }
    ~File() {
      if (handle != nullptr) std::fclose(handle);
    }
  };
  File tokens, ends;
};

ShardWriter::ShardWriter(const std::string& path, const Vocabulary& vocabulary)
    : path_(path), vocabulary_(vocabulary), files_(std::make_unique<Files>()) {
  files_->tokens.open(path);
  files_->ends.open(beside(path, ".docs"));
  files_->tokens.write(Header{}.data(), header_bytes);
}

ShardWriter::~ShardWriter() = default;

void ShardWriter::add_document(std::span<const std::int32_t> ids, std::span<const std::uint8_t> no_target) {
  for (const std::int32_t id : ids) {
    check(id >= 0 && id < vocabulary_.size, path_, ": id ", id, " is not in the vocabulary of ", vocabulary_.size, ".");
    largest_ = std::max(largest_, id);
  }
  if (vocabulary_.size > 65536) {
    files_->tokens.write(ids.data(), ids.size_bytes());
  } else {
    const std::vector<std::uint16_t> narrow(ids.begin(), ids.end());
    files_->tokens.write(narrow.data(), narrow.size() * 2);
  }
  for (std::size_t i = 0; i < no_target.size(); ++i) {
    if (no_target[i] == 0) continue;
    const auto bit = static_cast<std::size_t>(tokens_) + i;
    mask_.resize(std::max(mask_.size(), bit / 8 + 1));
    mask_[bit / 8] |= static_cast<std::uint8_t>(1U << bit % 8);
  }
  tokens_ += std::ssize(ids);
  files_->ends.write(&tokens_, sizeof tokens_);
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
    Files::File mask;
    mask.open(beside(path_, ".mask"));
    mask.write(mask_.data(), mask_.size());
    mask.close();
  }
  files_->ends.close();
  files_->tokens.rewind();
  files_->tokens.write(header.data(), header_bytes);
  files_->tokens.close();
}

// A file in memory, read only.
struct Shard::Mapping {
  explicit Mapping(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    check(file >= 0, path, ": the token file cannot be opened (", std::strerror(errno), ").");
    struct stat status {};
    void* address = nullptr;
    if (::fstat(file, &status) == 0 && status.st_size > 0) {
      address = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, file, 0);
    }
    ::close(file);
    check(address != MAP_FAILED, path, ": the token file cannot be mapped into memory (", std::strerror(errno), ").");
    data = static_cast<const std::uint8_t*>(address);
    bytes = address == nullptr ? 0 : static_cast<std::int64_t>(status.st_size);
  }
  ~Mapping() {
    if (data != nullptr) ::munmap(const_cast<std::uint8_t*>(data), static_cast<std::size_t>(bytes));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::uint8_t* data = nullptr;
  std::int64_t bytes = 0;
};

Shard::Shard(const std::string& path, const Vocabulary& expected, int threads)
    : path_(path), file_(std::make_shared<Mapping>(path)) {
  check(file_->bytes >= header_bytes, path, ": a token file begins with ", header_bytes, " bytes but this one has ",
        file_->bytes, ": it is cut off or no token file.");
  Header header;
  std::memcpy(header.data(), file_->data, header_bytes);
  const bool narrow = header[0] == magic_16 && header[1] == version_16;
  check(narrow || (header[0] == magic_32 && header[1] == version_32), path, ": magic ", header[0], " and version ",
        header[1], " are not those of a token file (", magic_16, " and ", version_16, ", or ", magic_32, " and ",
        version_32, ").");
  width_ = narrow ? 2 : 4;
  const bool extended = (header[5] & flag_extended) != 0;
  tokens_ = header[2];
  if (extended) {
    std::memcpy(&tokens_, &header[14], sizeof tokens_);
    vocabulary_.size = header[3];
    vocabulary_.eot = header[4];
    std::memcpy(vocabulary_.hash.data(), &header[6], sizeof vocabulary_.hash);
    check(tokens_ == header[2] || (header[2] == -1 && tokens_ > max_count_32), path,
          ": the header gives two numbers of tokens, ", header[2], " and ", tokens_, ": prepare the data again.");
  }
  // Compared without a product, which an absurd count would overflow.
  check(
      tokens_ >= 0 && (file_->bytes - header_bytes) / width_ == tokens_ && (file_->bytes - header_bytes) % width_ == 0,
      path, ": the header promises ", tokens_, " tokens of ", width_, " bytes, but after it there are ",
      file_->bytes - header_bytes, " bytes: the file is cut off or was not finished; prepare the data again.");
  const bool hash_known =
      std::any_of(expected.hash.begin(), expected.hash.end(), [](std::uint32_t word) { return word != 0; });
  if (extended && expected.size > 0) {
    check(!hash_known || expected.hash == vocabulary_.hash, path,
          ": the tokens were made with another tokenizer than the one in use: prepare the data again or give their "
          "tokenizer.model.");
    check(vocabulary_.size <= expected.size, path, ": the tokens are of a vocabulary of ", vocabulary_.size,
          " but the one in use has ", expected.size, ": set vocab_size or prepare the data again.");
  }
  limit_ = expected.size > 0 ? expected.size : extended ? vocabulary_.size : std::int64_t{1} << 31;
  // Our own largest id saves the pass, and makes it when it is wrong already.
  if (!extended || header[16] < 0 || header[16] >= limit_) {
    const std::int64_t bad = first_not_below(limit_, threads);
    if (bad >= 0) {
      std::int32_t id = 0;
      std::memcpy(&id, file_->data + byte_of(bad), static_cast<std::size_t>(width_));
      check(false, path, ": id ", static_cast<std::uint32_t>(id), " at byte ", byte_of(bad),
            " is not below the vocabulary size ", limit_, ": the file is damaged or of another tokenizer.");
    }
  }
  if (extended && (header[5] & flag_mask) != 0) {
    mask_file_ = std::make_shared<Mapping>(beside(path, ".mask"));
    check(mask_file_->bytes == (tokens_ + 7) / 8, beside(path, ".mask"), ": one bit for each of ", tokens_,
          " tokens is ", (tokens_ + 7) / 8, " bytes but the file has ", mask_file_->bytes, ": prepare the data again.");
    mask_ = mask_file_->data;
  }
}

std::int64_t Shard::first_not_below(std::int64_t limit, int threads) const {
  constexpr std::int64_t block = std::int64_t{1} << 20;
  std::atomic<std::int64_t> next{0}, found{tokens_};
  const auto search = [&]<class T>(T) {
    for (std::int64_t begin; (begin = next.fetch_add(block)) < found.load();) {
      const std::int64_t count = std::min(block, tokens_ - begin);
      const std::uint8_t* bytes = file_->data + byte_of(begin);
      const auto at = [&](std::int64_t i) {
        T id;
        std::memcpy(&id, bytes + i * width_, sizeof id);
        return id;
      };
      T largest = 0;  // a loop without a branch is a few times faster
      for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, at(i));
      if (static_cast<std::int64_t>(largest) < limit) continue;
      std::int64_t i = 0;
      while (static_cast<std::int64_t>(at(i)) < limit) ++i;
      for (std::int64_t old = found.load(); begin + i < old && !found.compare_exchange_weak(old, begin + i);) {
      }
    }
  };
  const auto work = [&] { width_ == 2 ? search(std::uint16_t{}) : search(std::uint32_t{}); };
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  {
    std::vector<std::jthread> workers;
    for (int i = 1; i < threads && static_cast<std::int64_t>(i) * block < tokens_; ++i) workers.emplace_back(work);
    work();
  }
  return found == tokens_ ? -1 : found.load();
}

void Shard::read(std::int64_t first, std::int64_t count, std::int32_t* ids) const {
  check(first >= 0 && count >= 0 && first + count <= tokens_, path_, ": tokens ", first, " to ", first + count,
        " were asked for but it has ", tokens_, ".");
  const std::uint8_t* bytes = file_->data + byte_of(first);
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t id = 0;
    std::memcpy(&id, bytes + i * width_, static_cast<std::size_t>(width_));
    check(id < static_cast<std::uint64_t>(limit_), path_, ": id ", id, " at byte ", byte_of(first + i),
          " is not below the vocabulary size ", limit_, ": the file is damaged or of another tokenizer.");
    ids[i] = static_cast<std::int32_t>(id);
  }
}

void Shard::read_mask(std::int64_t first, std::int64_t count, std::uint8_t* no_target) const {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t bit = first + i;
    no_target[i] = static_cast<std::uint8_t>(mask_ == nullptr ? 0 : mask_[bit / 8] >> bit % 8 & 1);
  }
}

std::vector<std::int64_t> Shard::document_ends() const {
  const std::string path = beside(path_, ".docs");
  if (::access(path.c_str(), F_OK) != 0) return {};
  const Mapping file(path);
  std::vector<std::int64_t> ends(static_cast<std::size_t>(file.bytes / 8));
  if (!ends.empty()) std::memcpy(ends.data(), file.data, ends.size() * 8);
  check(file.bytes % 8 == 0 && std::is_sorted(ends.begin(), ends.end()) && (ends.empty() ? 0 : ends.back()) == tokens_,
        path, ": the document ends do not ascend to the ", tokens_, " tokens of the shard: prepare the data again.");
  return ends;
}

}  // namespace onescale
