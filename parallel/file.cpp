#include "parallel/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

namespace onescale {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t largest_call = 1 << 30;  // one read or write moves less than 2 GiB

// Its owner, as long as it lives, holds a lock on it, which is seen from other machines and containers too, where the
// file system has locks. Without one, it may be younger than the moment in which its owner takes it.
bool abandoned(const fs::path& partial, pid_t owner) {
  const int descriptor = ::open(partial.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool free = ::flock(descriptor, LOCK_SH | LOCK_NB) == 0, held = !free && errno == EWOULDBLOCK;
  struct stat status {};
  const bool old = ::fstat(descriptor, &status) == 0 && status.st_mtime + 600 < ::time(nullptr);
  ::close(descriptor);
  if (free && (old || owner == ::getpid())) return true;  // a process of before had the same number
  return !held && ::kill(owner, 0) != 0 && errno == ESRCH;
}

// A name beside `path` that nothing has, so that no file of the user's is touched.
std::string free_name(const std::string& path) {
  remove_abandoned(path);
  std::error_code ignored;
  for (int i = 0;; ++i) {
    std::string name = str(path, ".partial-", ::getpid(), "-", i);
    if (!fs::exists(fs::symlink_status(name, ignored))) return name;
  }
}

}  // namespace

File::File(const std::string& path, const std::string& written, int flags)
    : path_(path), written_(written), descriptor_(::open(written.c_str(), flags | O_CLOEXEC, 0666)) {
  check_contents(descriptor_ >= 0 || (errno != ENOENT && errno != ENOTDIR) || (flags & O_CREAT) != 0, path,
                 ": there is no such file; check the path");
  if (descriptor_ < 0) fail("cannot be opened");
  if (written_ != path_) ::flock(descriptor_, LOCK_EX | LOCK_NB);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      written_(std::move(other.written_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  if (written_ != path_) ::unlink(written_.c_str());
}

File File::open(const std::string& path) {
  return {path, path, O_RDONLY};
}

File File::create(const std::string& path) {
  struct stat status {};
  const bool direct = lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode);
  return {path, direct ? path : free_name(path), O_WRONLY | O_CREAT | (direct ? O_TRUNC : O_EXCL)};
}

void File::fail(const std::string& what) const {
  const char* fix = errno == ENOSPC || errno == EDQUOT ? "free some space"
                    : errno == EFBIG                   ? "raise the limit on the size of files (ulimit -f)"
                                                       : "check the path and its rights";
  throw UnreadableFile(str(path_, ": ", what, ": ", std::strerror(errno), "; ", fix));
}

std::int64_t File::size() const {
  struct stat status {};
  if (fstat(descriptor_, &status) != 0) fail("cannot be examined");
  check_contents(S_ISREG(status.st_mode), path_, ": is not a file; check the path");
  return status.st_size;
}

void File::read(void* out, std::int64_t bytes, std::int64_t offset) const {
  auto* p = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = pread(descriptor_, p, static_cast<std::size_t>(std::min(bytes, largest_call)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(str("cannot read ", bytes, " bytes at ", offset));
    check_contents(n > 0, path_, ": ends at byte ", offset, ", ", bytes, " bytes early; it is truncated, get it anew");
    p += n, offset += n, bytes -= n;
  }
}

void File::write(const void* data, std::int64_t bytes, std::int64_t offset) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto most = static_cast<std::size_t>(std::min(bytes, largest_call));
    const ssize_t n = offset < 0 ? ::write(descriptor_, p, most) : ::pwrite(descriptor_, p, most, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(str("cannot write ", bytes, " more bytes"));
    p += n, bytes -= n;
    if (offset >= 0) offset += n;
  }
}

void File::close() {
  const bool synced = fsync(descriptor_) == 0 || errno == EINVAL;  // a device or a pipe knows no disk
  if (!synced || (written_ != path_ && std::rename(written_.c_str(), path_.c_str()) != 0)) fail("cannot be written");
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be written");
}

NewDirectory::NewDirectory(const std::string& target) : target_(plain_path(target)), path_(free_name(target_)) {
  std::error_code error;
  fs::create_directories(path_, error);
  check(!error, target_, ": the directory cannot be made (", error.message(), "); give a place that can be written");
  // What cannot be replaced later (files, ".", a mount, a link) is refused before the work.
  if (fs::exists(fs::symlink_status(target_, error))) {
    fs::rename(path_, target_, error);
    if (!error) fs::create_directory(path_, error);
    const std::string reason = error.message();
    if (std::error_code ignored; error) fs::remove(path_, ignored);
    check(!error, target_, ": a new directory cannot take this name (", reason, "); give a free one");
  }
  lock_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  ::flock(lock_, LOCK_EX | LOCK_NB);
}

NewDirectory::~NewDirectory() {
  std::error_code ignored;
  if (lock_ >= 0) ::close(lock_);
  if (path_ != target_) fs::remove_all(path_, ignored);
}

void remove_abandoned(const std::string& path) {
  const fs::path file(path), parent = file.has_parent_path() ? file.parent_path() : ".";
  const std::string prefix = file.filename().string() + ".partial-";
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    pid_t owner = 0;
    int number = 0;
    const char *const end = name.data() + name.size(), *at = std::from_chars(&name[prefix.size()], end, owner).ptr;
    if (at != end && *at == '-' && std::from_chars(at + 1, end, number).ptr == end && owner > 0 &&
        abandoned(entry.path(), owner))
      found.push_back(entry.path());
  }
  for (const fs::path& partial : found) fs::remove_all(partial, ignored);
}

void NewDirectory::publish() {
  sync_directory(path_);
  std::error_code error;
  fs::rename(path_, target_, error);
  check(!error, target_, ": the finished directory cannot take this name (", error.message(), "); give a free one");
  path_ = target_;
  sync_directory(fs::absolute(target_).parent_path().string());
}

std::string read_text(const std::string& path) {
  const File file = File::open(path);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(text.data(), std::ssize(text), 0);
  return text;
}

void write_text(const std::string& path, std::string_view text) {
  File file = File::create(path);
  file.write(text.data(), std::ssize(text));
  file.close();
}

void sync_directory(const std::string& path) {
  File::open(path).close();
}

std::string plain_path(const std::string& path) {
  const fs::path plain = fs::path(path).lexically_normal();
  return (plain.has_filename() || plain == plain.root_path() ? plain : plain.parent_path()).string();
}

}  // namespace onescale
