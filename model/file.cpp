#include "model/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace onescale {
namespace {

constexpr std::int64_t largest_call = 1 << 30;  // one read or write moves less than 2 GiB

}  // namespace

File::File(const std::string& path, int flags)
    : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
  check_contents(descriptor_ >= 0 || errno != ENOENT || (flags & O_CREAT) != 0, path, ": there is no such file");
  if (descriptor_ < 0) fail("cannot be opened");
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File File::open(const std::string& path) {
  return {path, O_RDONLY};
}
File File::create(const std::string& path) {
  return {path, O_WRONLY | O_CREAT | O_TRUNC};
}

void File::fail(const std::string& what) const {
  const char* fix = errno == ENOSPC || errno == EDQUOT ? "; free some space" : "";
  throw UnreadableFile(str(path_, ": ", what, ": ", std::strerror(errno), fix));
}

std::int64_t File::size() const {
  struct stat status {};
  if (fstat(descriptor_, &status) != 0) fail("cannot be examined");
  check_contents(S_ISREG(status.st_mode), path_, ": is not a file");
  return status.st_size;
}

void File::read(void* out, std::int64_t bytes, std::int64_t offset) const {
  auto* p = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = pread(descriptor_, p, static_cast<std::size_t>(std::min(bytes, largest_call)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(str("cannot read ", bytes, " bytes at ", offset));
    check_contents(n > 0, path_, ": ends at byte ", offset, ", ", bytes, " bytes early; it is truncated");
    p += n, offset += n, bytes -= n;
  }
}

void File::write(const void* data, std::int64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(descriptor_, p, static_cast<std::size_t>(std::min(bytes, largest_call)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(str("cannot write ", bytes, " more bytes"));
    p += n, bytes -= n;
  }
}

void File::close() {
  if (fsync(descriptor_) != 0 || ::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be written to the disk");
}

std::string read_text(const std::string& path) {
  const File file = File::open(path);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(text.data(), static_cast<std::int64_t>(text.size()), 0);
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  File file = File::create(path);
  file.write(text.data(), static_cast<std::int64_t>(text.size()));
  file.close();
}

void sync_directory(const std::string& path) {
  File::open(path).close();
}

}  // namespace onescale
